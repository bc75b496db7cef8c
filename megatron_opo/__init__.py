"""Exact on-policy RL with the optimal reward baseline, on Megatron-Core and SGLang."""

__version__ = "0.1.0"
