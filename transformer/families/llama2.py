"""Llama 2 (Touvron et al. 2023): Llama 3's decoder at other numbers; its checkpoints are read by that family."""

from transformer.families.llama3 import Dims, spec, table, to_hf

__all__ = ["Dims", "spec", "table", "to_hf"]
