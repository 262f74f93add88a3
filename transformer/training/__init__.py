"""Training: data, state, step, optimiser and loop."""
