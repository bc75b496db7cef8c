"""Packed attention against attention written out in float64, one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.actor import attention, context_parallel
from megatron_opo.actor.attention import packed_attention
from megatron_opo.actor.packing import Bounds, Sharing, rows_of


def reference(query, key, value, lengths, scale, window=None):
    """softmax(q k^T * scale) v with the future and what is out of the window masked, in the inputs'
    own precision."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones(len(q), len(q), dtype=torch.bool).tril(-window)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, v))
    return torch.cat(outputs)


def make_inputs(lengths, heads, kv_heads, dim, dtype):
    generator = torch.Generator().manual_seed(sum(lengths))
    tensors = [
        torch.randn(sum(lengths), h, dim, generator=generator).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return tensors, Bounds(cu_seqlens, max(lengths))


def plain(query, key, value, bounds, scale, window):
    return packed_attention(query, key, value, bounds, bounds, scale, window)


def compare(lengths, heads, kv_heads, dtype, tolerance, scale=None, window=None, how=plain):
    dim = 8
    inputs, bounds = make_inputs(lengths, heads, kv_heads, dim, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = how(*inputs, bounds, scale, window)
    expected = reference(*wide, lengths, scale or dim**-0.5, window)
    assert out.dtype == dtype and out.shape == inputs[0].shape
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual_grads = torch.autograd.grad(out, inputs, gradient)
    expected_grads = torch.autograd.grad(expected, wide, gradient.double())
    for actual, wanted in zip((out, *actual_grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    window=st.one_of(st.none(), st.integers(1, 80)),
)
@settings(max_examples=100, deadline=None)
def test_output_and_gradients_equal_a_float64_reference(lengths, heads, window):
    compare(lengths, *heads, torch.float32, 2e-5, window=window)


def by_context_parallel_ranks(ranks):
    """What each of them computes, put together; the keys gathered within this process."""

    def attend(query, key, value, bounds, scale, window):
        lengths = tuple(bounds.cu_seqlens.diff().tolist())
        parts = [rows_of(bounds.cu_seqlens, Sharing(rank, ranks)) for rank in range(ranks)]
        order = torch.cat(parts)
        assert torch.equal(order.sort().values, torch.arange(len(query)))
        outputs = []
        for rank, rows in enumerate(parts):
            chunks = context_parallel.chunks_of(lengths, rank, ranks, query.device)
            keys, values = (
                context_parallel._Copy.apply(x[order], chunks.source, chunks.copies)
                for x in (key, value)
            )
            outputs.append(
                packed_attention(
                    query[rows], keys, values, chunks.queries, chunks.keys, scale, window
                )
            )
        return torch.cat(outputs)[order.argsort()]

    return attend


@given(
    ranks=st.integers(2, 4),
    quarters=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    window=st.one_of(st.none(), st.integers(1, 80)),
)
@settings(max_examples=60, deadline=None)
def test_context_parallel_ranks_together_equal_a_float64_reference(ranks, quarters, heads, window):
    lengths = [2 * ranks * n for n in quarters]
    compare(
        lengths, *heads, torch.float32, 2e-5, window=window, how=by_context_parallel_ranks(ranks)
    )


@given(
    ranks=st.integers(2, 5),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_context_parallel_ranks_share_the_work_evenly(ranks, lengths):
    """As many tokens each, and as many pairs of a query and a key that it attends to."""
    cu_seqlens = torch.tensor([0, *(2 * ranks * n for n in lengths)]).cumsum(0)
    place = torch.cat([torch.arange(2 * ranks * n) for n in lengths])
    work = [
        (len(rows), int((place[rows] + 1).sum()))
        for rows in (rows_of(cu_seqlens, Sharing(rank, ranks)) for rank in range(ranks))
    ]
    assert len(set(work)) == 1


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [16, 17], [300, 2, 299, 1, 80]])
def test_lengths_at_the_edges_of_buckets(lengths):
    compare(lengths, 4, 2, torch.float32, 2e-5)


def test_bfloat16_and_a_scale_of_its_own():
    compare([33, 5, 40], 4, 2, torch.bfloat16, 0.1)
    compare([33, 5, 40], 4, 2, torch.float32, 2e-5, scale=0.5)
    compare([33, 5, 40], 4, 2, torch.bfloat16, 0.1, window=6)


@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_does_not_see_its_neighbours_to_the_bit(window):
    """Also through padding: garbage next door, however large, changes nothing."""
    lengths = [20, 19, 24]
    (query, key, value), bounds = make_inputs(lengths, 4, 2, 8, torch.float32)
    before = plain(query, key, value, bounds, None, window)[20:39]
    with torch.no_grad():
        for x in (query, key, value):
            x[:20] = 1e30
            x[39:] = -1e30
    after = plain(query, key, value, bounds, None, window)[20:39]
    assert torch.equal(before, after)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=300))
@settings(max_examples=60, deadline=None)
def test_the_layout_covers_every_token_once_with_bounded_padding(lengths):
    layout = attention._layouts(tuple(lengths), tuple(lengths), torch.device("cpu")).queries
    total = sum(lengths)
    real = layout.source[layout.source < total]
    assert real.sort().values.tolist() == list(range(total))
    assert torch.equal(layout.source[layout.places], torch.arange(total))
    padded = sum(count * longest for count, longest in layout.shapes)
    assert padded == layout.source.numel()
    short = sum(1 for n in lengths if n <= attention.SHORT)
    assert padded <= total / attention.MIN_FILL + attention.SHORT * short
    # log(4000 / 16) / log(1 / 0.75) = 19.2 buckets at most above SHORT, and one for the rest.
    assert len(layout.shapes) <= 21


def test_many_short_sequences_cost_linear_work_and_few_calls():
    """Attention over the whole pack would cost 64 times as much for 8 times the tokens."""

    def work_and_calls(count):
        lengths = tuple(24 + i % 9 for i in range(count))
        shapes = attention._layouts(lengths, lengths, torch.device("cpu")).queries.shapes
        return sum(n * longest**2 for n, longest in shapes), len(shapes)

    assert work_and_calls(1024)[0] == 8 * work_and_calls(128)[0]
    assert work_and_calls(1024)[1] == 1
