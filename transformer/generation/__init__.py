"""Prefill, decoding and sampling loops."""
