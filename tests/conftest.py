"""Fixtures that several test modules share."""

from servers import (
    both_launched,
    launched_llama_pool,
    launched_qwen_pool,
    llama_pool,
    qwen_pool,
)

__all__ = [
    "both_launched",
    "launched_llama_pool",
    "launched_qwen_pool",
    "llama_pool",
    "qwen_pool",
]
