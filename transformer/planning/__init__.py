"""Accounting of parameters, FLOPs and caches, from the spec alone."""
