"""Causal attention over packed sequences without Transformer Engine.

Sequences of similar length share one padded call of scaled_dot_product_attention. Padding stands to
the right of the real tokens, which a causal mask never lets look at it, so results are exact; the
cost is linear in the number of short sequences. On CUDA in half precision torch's variable-length
kernel takes the packed tensors as they are.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

# A bucket's shortest sequence has at least this share of the longest one's tokens, so at most a
# quarter of a padded call is padding.
MIN_FILL = 0.75
# Below this length a call costs more than its arithmetic: such sequences share one bucket.
SHORT = 16


@dataclass(frozen=True)
class _Layout:
    """Packed rows [T] to padded rows [P] and back.

    Example for lengths (2, 3): source [2, 3, 4, 0, 1, 5] (row 5 = T is padding), places
    [3, 4, 0, 1, 2], shapes ((2, 3),): one bucket of two sequences of three rows.
    """

    source: torch.Tensor
    places: torch.Tensor
    shapes: tuple[tuple[int, int], ...]


@lru_cache(maxsize=16)
def _layout(lengths: tuple[int, ...], device: torch.device) -> _Layout:
    """Cached because every layer of a micro-batch, forward and backward, asks for the same one."""
    total = sum(lengths)
    size = torch.tensor(lengths)
    starts = size.cumsum(0) - size
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    pieces, shapes = [], []
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        shortest = 1 if longest <= SHORT else MIN_FILL * longest
        last = first
        while last < len(order) and lengths[order[last]] >= shortest:
            last += 1
        members = torch.tensor(order[first:last])
        step = torch.arange(longest)
        rows = starts[members, None] + step
        pieces.append(torch.where(step < size[members, None], rows, total).flatten())
        shapes.append((last - first, longest))
        first = last
    source = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
    places = torch.empty(total + 1, dtype=torch.int64)
    places[source] = torch.arange(source.numel())
    return _Layout(source.to(device), places[:total].to(device), tuple(shapes))


class _Pad(torch.autograd.Function):
    """[T, ...] to [P, ...] with zeros as padding. A gather both ways, unlike autograd's scatter."""

    @staticmethod
    def forward(ctx, packed, source, places):
        ctx.save_for_backward(places)
        return _with_zero_row(packed).index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """[P, ...] to [T, ...]; padding gets no gradient."""

    @staticmethod
    def forward(ctx, padded, source, places):
        ctx.save_for_backward(source)
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        (source,) = ctx.saved_tensors
        return _with_zero_row(grad).index_select(0, source), None, None


def _with_zero_row(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of each packed sequence over itself.

    Args:
        query: [T, heads, D].
        key, value: [T, kv_heads, D]; heads is a multiple of kv_heads.
        cu_seqlens: [N+1] int32, from 0 to T.
        max_seqlen: length of the longest sequence.
        scale: of the scores; None is 1 / sqrt(D).
        window: how many tokens, its own among them, a token attends to; None is all before it.

    Returns:
        [T, heads, D] in the dtype of `query`.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and varlen_attn is not None:
        return varlen_attn(  # pyright: ignore[reportReturnType]
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    layout = _layout(tuple(cu_seqlens.diff().tolist()), query.device)
    padded = [_Pad.apply(x, layout.source, layout.places) for x in (query, key, value)]
    sizes = [count * longest for count, longest in layout.shapes]
    outputs = []
    for shape, *parts in zip(layout.shapes, *(x.split(sizes) for x in padded), strict=True):
        # [count * longest, heads, D] -> [count, heads, longest, D]
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if window is None or window >= shape[1]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = _window_mask(shape[1], window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs), layout.source, layout.places)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[length, length] true where the row's token attends to the column's."""
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance
    return (distance >= 0) & (distance < window)


class PackedAttention(torch.nn.Module):
    """`core_attention` of Megatron's layer spec: `packed_attention` over its PackedSeqParams."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused,
    ):
        super().__init__()
        self.scale = softmax_scale
        size, layers = config.window_size, config.window_attn_skip_freq
        self.window = None
        if size is not None and is_layer_window_attention(
            size,
            layers,  # pyright: ignore[reportArgumentType]
            layer_number,
        ):
            self.window = size[0] + 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        attn_mask_type: object = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[T, heads, D] and twice [T, kv_heads, D] to [T, heads * D]."""
        assert packed_seq_params is not None, "only packed sequences (qkv_format thd) are supported"
        out = packed_attention(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q,
            packed_seq_params.max_seqlen_q,
            self.scale,
            self.window,
        )
        return out.flatten(1)
