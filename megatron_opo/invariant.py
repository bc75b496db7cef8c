"""Operations of a transformer whose rows do not depend on what they are computed with, on a CPU.

A token's logits are to be the same to the bit alone and in a full batch, in a prefill and in a
decode, with and without a cached prefix. Norms, activations and softmax are so already: they work
row by row. A matrix product is not: which kernel adds up a row, in which order, depends on the
number of rows and on the length of the sum. Here all products have whole tiles of rows, and sums
over a context go through blocks of one length.
"""

import torch
from torch.nn.functional import pad

# Kernels may add up rows beyond their last whole tile in another order. Widest tile seen: 8.
ROW_TILE = 8
# Fewer columns are added up otherwise, too. Fewest seen to be enough: 12.
COLUMN_TILE = 16
# Short enough that no kernel splits a sum over so many keys by a rule that looks at its length.
KEY_BLOCK = 32
# Bounds the memory of scores: [heads, rows, keys].
QUERY_ROWS = 256


def check() -> None:
    """Try on this machine's kernels what its rows depend on.

    Raises:
        RuntimeError: a row that was computed alone is another one among others.
    """
    generator = torch.Generator().manual_seed(0)
    count = 2 * KEY_BLOCK + ROW_TILE // 2 + 1
    rows, matrix, query, key = (
        torch.randn(shape, generator=generator)
        for shape in ((count, 576), (576, 200), (1, count, 6, 64), (1, 2, count, 64))
    )
    positions = torch.arange(count)[None]
    products = matmul(rows, matrix)
    attended = attention(query, key, key, positions, 0.1)
    for i in range(count):
        one, seen = slice(i, i + 1), slice(i + 1)
        context = key[:, :, seen]
        alone = attention(query[:, one], context, context, positions[:, one], 0.1)
        if not (
            torch.equal(matmul(rows[one], matrix), products[one])
            and torch.equal(matmul(rows[one], matrix[:, :8]), products[one, :8])
            and torch.equal(alone, attended[:, one])
        ):
            raise RuntimeError(
                "on this CPU a value of a matrix product depends on those beside it, so sampling "
                "is not reproducible; set rollout.deterministic to false"
            )


def matmul(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [M, K] @ matrix [K, N]."""
    count, columns = rows.shape[0], matrix.shape[1]
    rows = _fill(rows, 0, ROW_TILE)
    if columns < COLUMN_TILE:
        matrix = _fill(matrix, 1, COLUMN_TILE)
    # With `out`, because aten::mm itself may be what is defined by this function.
    out = rows.new_empty(rows.shape[0], matrix.shape[1])
    torch.mm(rows, matrix, out=out)
    return out[:count, :columns]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalises the last dimension in float32 and scales in the input's dtype: the order in which
    the Hugging Face models round."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(hidden.dtype)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention, computed in float32.

    Args:
        query: [B, R, heads, channels]
        key, value: [B, key-value heads, L, channels]; place i of L is position i.
        positions: [B, R], each below L: a query sees the keys up to its own position.
        window: and of these only so many before it.

    Returns:
        [B, R, heads, channels of the value], in the dtype of the query.
    """
    parts = [
        _attention(q, key, value, p, scale, window)
        for q, p in zip(query.split(QUERY_ROWS, 1), positions.split(QUERY_ROWS, 1), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _attention(query, key, value, positions, scale, window) -> torch.Tensor:
    batch, count, heads, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # [B * key-value heads, rows, channels]: the query heads that share a key are its rows.
    rows = query.float().unflatten(2, (kv_heads, group)).transpose(1, 2)
    rows = _fill(rows.reshape(batch * kv_heads, count * group, -1), 1, ROW_TILE)
    keys, values = (_fill(part.float().flatten(0, 1), 1, KEY_BLOCK) for part in (key, value))
    channels = values.shape[2]
    values = _fill(values, 2, COLUMN_TILE)
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(_hidden(positions, group, scores, window), -torch.inf)
    weights = torch.softmax(scores, -1)
    out = values.new_zeros(rows.shape[0], rows.shape[1], values.shape[2])
    for start in range(0, values.shape[1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out.baddbmm_(weights[:, :, block], values[:, block])
    out = out[:, : count * group, :channels].unflatten(1, (count, group))
    out = out.unflatten(0, (batch, kv_heads))
    return out.transpose(1, 2).flatten(2, 3).to(query.dtype)


def _hidden(
    positions: torch.Tensor, group: int, scores: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[B * key-value heads, rows, keys]: what a query must not see."""
    batch = positions.shape[0]
    last = _fill(positions.repeat_interleave(group, 1), 1, ROW_TILE).unsqueeze(2)
    places = torch.arange(scores.shape[2], device=scores.device)
    hidden = places > last
    if window is not None:
        hidden |= places < last - window
    return hidden.unsqueeze(1).expand(-1, scores.shape[0] // batch, -1, -1).flatten(0, 1)


def _fill(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Zeros at the end of `dim`, up to a multiple."""
    missing = -tensor.shape[dim] % multiple
    return pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor
