"""Pallas kernels for TPUs: pure functions of arrays, each beside the plain body of `ops/` that it has to equal."""
