"""Flax modules: parameters, their names and their logical axes. One module, one spec field."""
