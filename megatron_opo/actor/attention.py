"""Causal attention over packed sequences without Transformer Engine.

Sequences of similar length share one padded call of scaled_dot_product_attention. Padding stands to
the right of the real tokens, which a causal mask never lets look at it, so results are exact; the
cost is linear in the number of short sequences. On CUDA in half precision torch's variable-length
kernel takes the packed tensors as they are. A context-parallel rank has queries of a part of each
sequence; its chunks are sequences here, with more keys than queries.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_opo.actor.context_parallel import gather_keys
from megatron_opo.actor.packing import Bounds

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


@dataclass(frozen=True)
class _Layouts:
    """Of queries and keys, in the same buckets. `behind` has for each bucket how many keys [N] of
    each sequence stand before its first query's own; None where there are none."""

    queries: _Layout
    keys: _Layout
    behind: list[torch.Tensor | None]


@lru_cache(maxsize=16)
def _layouts(queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device) -> _Layouts:
    """Cached because every layer of a micro-batch, forward and backward, asks for the same ones."""
    buckets = _buckets(queries, keys)
    of_queries = _layout(queries, buckets, device)
    if queries == keys:
        return _Layouts(of_queries, of_queries, [None for _ in buckets])
    behind = [torch.tensor([keys[i] - queries[i] for i in members]) for members in buckets]
    return _Layouts(of_queries, _layout(keys, buckets, device), [n.to(device) for n in behind])


def _buckets(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[list[int]]:
    """Sequences of similar length, and of the same share of queries."""

    def rank(i: int) -> tuple[float, int]:
        return keys[i] / queries[i], -queries[i]

    order = sorted((i for i, n in enumerate(queries) if n), key=rank)
    buckets: list[list[int]] = []
    share, shortest = 0.0, 0.0
    for i in order:
        if not buckets or keys[i] / queries[i] != share or queries[i] < shortest:
            share = keys[i] / queries[i]
            shortest = 1 if queries[i] <= SHORT else MIN_FILL * queries[i]
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def _layout(lengths: tuple[int, ...], buckets: list[list[int]], device: torch.device) -> _Layout:
    total = sum(lengths)
    size = torch.tensor(lengths)
    starts = size.cumsum(0) - size
    pieces, shapes = [], []
    for bucket in buckets:
        longest = max(lengths[i] for i in bucket)
        members = torch.tensor(bucket)
        step = torch.arange(longest)
        rows = starts[members, None] + step
        pieces.append(torch.where(step < size[members, None], rows, total).flatten())
        shapes.append((len(bucket), longest))
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
    queries: Bounds,
    keys: Bounds,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of each packed sequence over itself.

    Args:
        query: [T, heads, D]; of each sequence its last tokens, as many as `queries` says.
        key, value: [K, kv_heads, D]; heads is a multiple of kv_heads.
        queries: of T.
        keys: of K; as many sequences, none shorter than its queries.
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
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.longest,
            keys.longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    lengths = [tuple(each.cu_seqlens.diff().tolist()) for each in (queries, keys)]
    layouts = _layouts(*lengths, query.device)
    outputs = []
    for q, k, v, behind in zip(
        _padded(query, layouts.queries),
        _padded(key, layouts.keys),
        _padded(value, layouts.keys),
        layouts.behind,
        strict=True,
    ):
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if behind is None and (window is None or window >= k.shape[2]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = _visible(q.shape[2], k.shape[2], behind, window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs), layouts.queries.source, layouts.queries.places)


def _padded(packed: torch.Tensor, layout: _Layout) -> list[torch.Tensor]:
    """[T, heads, D] to [count, heads, longest, D] for each bucket."""
    padded = _Pad.apply(packed, layout.source, layout.places)
    sizes = [count * longest for count, longest in layout.shapes]
    return [
        part.unflatten(0, shape).transpose(1, 2)
        for shape, part in zip(layout.shapes, padded.split(sizes), strict=True)
    ]


def _visible(
    rows: int,
    columns: int,
    behind: torch.Tensor | None,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """[rows, columns], or [N, 1, rows, columns] with `behind`: true where the row's token attends
    to the column's."""
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)
    if behind is not None:
        distance = behind[:, None, None, None] + distance
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


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
        self.attend = packed_attention
        self.scale = softmax_scale
        self.is_split = config.context_parallel_size > 1
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
        """[T, heads, D] and twice [T, kv_heads, D] to [T, heads * D]; context-parallel ranks have
        T / cp rows each."""
        assert packed_seq_params is not None, "only packed sequences (qkv_format thd) are supported"
        bounds = Bounds(packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q)
        queries = keys = bounds
        if self.is_split:
            group = parallel_state.get_context_parallel_group()
            key, value, queries, keys = gather_keys(
                key,
                value,
                bounds,
                group,  # pyright: ignore[reportArgumentType]
            )
        out = self.attend(query, key, value, queries, keys, self.scale, self.window)
        return out.flatten(1)
