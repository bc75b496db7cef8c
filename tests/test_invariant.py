"""Rows that do not depend on what they are computed with, held against float64 and each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo import invariant
from megatron_opo.invariant import attention, matmul

CONTEXT = 300
SHAPES = st.sampled_from([(4, 2, 16), (9, 3, 64), (4, 4, 24), (16, 8, 128), (3, 1, 7)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    count=st.integers(1, 150),
    sizes=st.sampled_from([(64, 192), (100, 51), (576, 1536), (1536, 576)]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    columns=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=DTYPES,
)
@settings(max_examples=60, deadline=None)
def test_a_value_of_a_product_is_the_same_among_any_others(count, sizes, cut, columns, dtype):
    """Of columns, too: the servers' parameters have other ones side by side than Megatron's."""
    rows, matrix = (
        normal(count, sizes[0], dtype=dtype),
        normal(*sizes, seed=1, dtype=dtype).mul(0.1),
    )
    product = matmul(rows, matrix)
    some, few = (
        slice(first, last + 1)
        for shares, size in ((cut, count), (columns, sizes[1]))
        for first, last in [sorted(int(share * (size - 1)) for share in shares)]
    )
    assert torch.equal(matmul(rows[some].clone(), matrix[:, few]), product[some, few])
    exact = rows.double() @ matrix.double()
    rounding = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(product.double(), exact, atol=rounding, rtol=rounding)


def context(shape, dtype):
    heads, kv_heads, channels = shape
    return (
        normal(1, CONTEXT, heads, channels, dtype=dtype),
        normal(1, kv_heads, CONTEXT, channels, seed=1, dtype=dtype),
        normal(1, kv_heads, CONTEXT, channels, seed=2, dtype=dtype),
        torch.arange(CONTEXT)[None],
    )


@given(shape=SHAPES, dtype=DTYPES, window=st.none() | st.integers(1, 400))
@settings(max_examples=12, deadline=None)
def test_attention_is_that_of_the_definition(shape, dtype, window):
    query, key, value, positions = context(shape, dtype)
    scale = shape[2] ** -0.5
    group = shape[0] // shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("bqhc,bhkc->bhqk", query.double(), keys) * scale
    distance = positions[0][:, None] - positions[0]
    allowed = (distance >= 0) & (distance <= (CONTEXT if window is None else window))
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    exact = torch.einsum("bhqk,bhkc->bqhc", weights, values)
    found = attention(query, key, value, positions, scale, window)
    assert found.dtype == dtype
    rounding = 3e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), exact, atol=rounding, rtol=rounding)


@given(
    shape=SHAPES,
    dtype=DTYPES,
    window=st.none() | st.integers(1, 400),
    first=st.integers(0, CONTEXT - 1),
    count=st.integers(1, CONTEXT),
)
@settings(max_examples=60, deadline=None)
def test_a_query_is_answered_the_same_in_prefill_chunk_and_decode(
    shape, dtype, window, first, count
):
    query, key, value, positions = context(shape, dtype)
    whole = attention(query, key, value, positions, 0.2, window)
    chunk = slice(first, first + count)
    seen = slice(min(first + count, CONTEXT))
    of_chunk = attention(
        query[:, chunk], key[:, :, seen], value[:, :, seen], positions[:, chunk], 0.2, window
    )
    assert torch.equal(of_chunk, whole[:, chunk])


def test_a_query_is_answered_the_same_beside_other_requests():
    query, key, value, positions = context((9, 3, 64), torch.float32)
    whole = attention(query, key, value, positions, 0.2)
    places = torch.tensor([299, 0, 17, 128, 17])
    decoded = attention(
        query[0, places, None],
        torch.cat([key, key.flip(2), key, key, key]),
        torch.cat([value, value.flip(2), value, value, value]),
        places[:, None],
        0.2,
    )
    same = [0, 2, 3, 4]
    assert torch.equal(decoded[same, 0], whole[0, places[same]])


def test_kernels_that_break_the_promise_are_noticed(monkeypatch):
    invariant.check()
    monkeypatch.setattr(invariant, "ROW_TILE", 1)
    with pytest.raises(RuntimeError, match=r"rollout\.deterministic"):
        invariant.check()
