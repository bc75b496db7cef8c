"""Frequencies of the rotary embedding (RoFormer, arXiv 2104.09864) and its long-context kinds.

All in float32, in the order of operations in which transformers computes them, so that they equal
its to the bit; on the CPU, since another device's pow may round differently.
"""

import math

import torch

from megatron_opo.weights.families import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians that each pair of channels turns per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    tokens_per_radian = rope.theta**exponents
    return SCALINGS[rope.kind](tokens_per_radian, rope, head_dim)


def token_angles(frequencies: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T, 1, 1, head_dim] angles of every token, its position counted within its own sequence.

    Args:
        frequencies: [head_dim / 2] float32.
        cu_seqlens: [N+1] from 0 to T, on the same device.
    """
    total = int(cu_seqlens[-1])
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=total)
    positions = torch.arange(total, device=cu_seqlens.device) - starts
    angles = positions[:, None].float() * frequencies
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def _plain(tokens_per_radian: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    return 1.0 / tokens_per_radian


def _linear(tokens_per_radian: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """Position interpolation, arXiv 2306.15595."""
    return 1.0 / tokens_per_radian / rope.values["factor"]


def _llama3(tokens_per_radian: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """Llama 3.1 (arXiv 2407.21783): channels that turn less than `low_freq_factor` times within the
    original context are slowed down by `factor`, those above `high_freq_factor` turns are kept, and
    in between one goes over into the other."""
    factor, low, high = (
        rope.values[key] for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = rope.values["original_max_position_embeddings"]
    frequencies = 1.0 / tokens_per_radian
    tokens_per_turn = 2 * math.pi / frequencies
    is_slow, is_fast = tokens_per_turn > context / low, tokens_per_turn < context / high
    ends = torch.where(is_slow, frequencies / factor, frequencies)
    share = (context / tokens_per_turn - low) / (high - low)
    between = (1 - share) * ends / factor + share * ends
    return torch.where(~is_fast & ~is_slow, between, ends)


def _yarn(tokens_per_radian: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """YaRN, arXiv 2309.00071: channels that turn more than `beta_fast` times within the original
    context are kept, those below `beta_slow` turns interpolated, with a ramp between."""
    factor, context = rope.values["factor"], rope.values["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(channel(rope.values["beta_fast"])), 0)
    last = min(math.ceil(channel(rope.values["beta_slow"])), head_dim - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * tokens_per_radian) * (1 - kept) + 1.0 / tokens_per_radian * kept


SCALINGS = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
