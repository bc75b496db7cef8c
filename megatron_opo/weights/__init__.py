"""Weights between Hugging Face directories and Megatron models, in any layout."""

from megatron_opo.weights.export import export_hf
from megatron_opo.weights.load import load_hf
from megatron_opo.weights.save import save_hf

__all__ = ["export_hf", "load_hf", "save_hf"]
