"""Attention over a server's cache, held against the definition in float64 and against itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo import attention_kernel
from megatron_opo.errors import KernelError

# Heads, key-value heads, channels of a key, channels of a value: also such that do not fill a
# vector of 16.
SHAPES = st.sampled_from(
    [(4, 2, 32, 32), (9, 3, 64, 64), (2, 1, 128, 128), (4, 4, 24, 40), (3, 1, 5, 7), (4, 2, 96, 80)]
)
WAYS = [attention_kernel.attend, attention_kernel.attend_slowly]


class Cache:
    """Random requests whose places lie all over the cache."""

    def __init__(self, shape, lengths, dtype=torch.float32, seed=0):
        draw = torch.Generator().manual_seed(seed)
        heads, kv_heads, channels, value_channels = shape
        slots, longest = sum(lengths) + 3, max(lengths)
        self.keys, self.values = (
            torch.randn(slots, kv_heads, size, generator=draw).to(dtype)
            for size in (channels, value_channels)
        )
        free = torch.randperm(slots, generator=draw).to(torch.int32)
        self.table = torch.full((len(lengths), longest + 2), 10**6, dtype=torch.int32)
        for request, length in enumerate(lengths):
            self.table[request, :length], free = free[:length], free[length:]
        self.queries = [
            torch.randn(length, heads, channels, generator=draw).to(dtype) for length in lengths
        ]
        self.scale = channels**-0.5

    def attend(self, wanted, window=None, way=attention_kernel.attend):
        """`wanted`: pairs of request and position -> [rows, heads, channels of a value]."""
        requests, positions = torch.tensor(wanted).unbind(1)
        query = torch.stack([self.queries[request][position] for request, position in wanted])
        out = torch.full((*query.shape[:2], self.values.shape[2]), torch.nan, dtype=query.dtype)
        cache = self.keys, self.values, self.table
        way(query, out, *cache, requests, positions, self.scale, window)
        return out

    def exact(self, request, position, window=None):
        first = 0 if window is None else max(0, position - window)
        slots = self.table[request, first : position + 1].long()
        query = self.queries[request][position].double()
        group = len(query) // self.keys.shape[1]
        keys, values = (
            part[slots].double().repeat_interleave(group, 1) for part in (self.keys, self.values)
        )
        weights = (torch.einsum("hc,khc->hk", query, keys) * self.scale).softmax(1)
        return torch.einsum("hk,khc->hc", weights, values)


@given(
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    window=st.none() | st.integers(0, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 99),
)
def test_attention_is_that_of_the_definition(shape, lengths, window, dtype, way, seed):
    cache = Cache(shape, lengths, dtype, seed)
    wanted = [(request, at) for request, length in enumerate(lengths) for at in range(length)]
    found = cache.attend(wanted, window, way)
    exact = torch.stack([cache.exact(*each, window) for each in wanted])
    rounding = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), exact, atol=rounding, rtol=rounding)


@given(
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    window=st.none() | st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    order=st.randoms(use_true_random=False),
    way=st.sampled_from(WAYS),
)
def test_a_query_is_answered_the_same_beside_any_others(shape, lengths, window, dtype, order, way):
    cache = Cache(shape, lengths, dtype)
    prefill = [(request, at) for request, length in enumerate(lengths) for at in range(length)]
    whole = dict(zip(prefill, cache.attend(prefill, window, way), strict=True))
    # As a decode step has them: one of each of some requests.
    some = [(request, order.randrange(length)) for request, length in enumerate(lengths)]
    order.shuffle(some)
    some = some[: order.randint(1, len(some))]
    for each, found in zip(some, cache.attend(some, window, way), strict=True):
        assert torch.equal(found, whole[each])


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr(attention_kernel, "PRODUCTS_PER_THREAD", 1)
    cache = Cache((4, 2, 32, 32), [200, 3, 90])
    wanted = [(0, at) for at in range(200)] + [(1, 2), (2, 89)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cache.attend(wanted)
        torch.set_num_threads(3)
        assert torch.equal(cache.attend(wanted), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1e-30, 1.0, 60.0, 1e4])
def test_scores_of_any_size(size):
    cache = Cache((4, 2, 32, 32), [70], seed=3)
    cache.queries[0] *= size
    found = cache.attend([(0, 69)])[0]
    torch.testing.assert_close(found.double(), cache.exact(0, 69), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("place", [0, 40, 69])
def test_what_is_not_a_number_is_not_hidden(place):
    cache = Cache((2, 2, 32, 32), [70])
    cache.keys[cache.table[0, place].long(), 0] = torch.nan
    found = cache.attend([(0, 69), (0, max(0, place - 1))])
    assert found[0, 0].isnan().all() and not found[0, 1].isnan().any()
    assert not found[1].isnan().any() or place == 0


def test_a_server_without_a_compiler_attends_slowly_and_says_so(monkeypatch, caplog):
    def missing():
        raise KernelError("no C++ compiler")

    monkeypatch.setattr(attention_kernel, "library", missing)
    attention_kernel.best.cache_clear()
    try:
        assert attention_kernel.best() is attention_kernel.attend_slowly
        assert "attention is slow: no C++ compiler" in caplog.text
    finally:
        attention_kernel.best.cache_clear()
