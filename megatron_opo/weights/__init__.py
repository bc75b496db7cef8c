"""Weights between Hugging Face directories and Megatron models, in any layout."""
