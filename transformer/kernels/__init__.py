"""Pallas TPU kernels."""
