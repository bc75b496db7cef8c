import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.spans import Span, Spans


class Clock:
    """By hand; whole seconds, so that sums are exact."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


# What a process does: waits of whole seconds, and named spans of the same.
work = st.recursive(
    st.integers(0, 9),
    lambda inner: st.lists(
        st.integers(0, 9) | st.tuples(st.sampled_from("abc"), inner), max_size=5
    ),
    max_leaves=25,
)


def do(spans: Spans, clock: Clock, what) -> int:
    """Seconds that it takes."""
    if isinstance(what, int):
        clock.now += what
        return what
    total = 0
    for each in what:
        if isinstance(each, int):
            clock.now += each
            total += each
        else:
            with spans.of(each[0]):
                total += do(spans, clock, each[1])
    return total


@given(before=work, after=work)
def test_each_level_adds_up_to_the_one_above_and_the_outermost_to_all(before, after):
    clock = Clock()
    spans = Spans(clock)
    for what in (before, after):
        total = do(spans, clock, what)
        seconds = spans.take().seconds()
        assert (spans.taken.end - spans.taken.start, spans.taken.end) == (total, clock.now)
        parents = {path.rpartition("/")[0] for path in seconds}
        assert "" in parents, "also where nothing has a name"
        for parent in parents:
            parts = [v for path, v in seconds.items() if path.rpartition("/")[0] == parent]
            assert sum(parts) == (seconds[parent] if parent else total)
            assert f"{parent}/unaccounted".lstrip("/") in seconds
        assert min(seconds.values()) >= 0


def test_what_is_open_around_it_gives_a_span_its_path_also_where_blocks_would_not_do():
    clock = Clock()
    spans = Spans(clock)

    def slow_items():
        for item in "xy":
            clock.now += 2
            yield item

    with spans.of("sync"):
        for _ in spans.each("gather", slow_items()):
            with spans.of("send"):
                clock.now += 5
    with pytest.raises(ZeroDivisionError), spans.of("update"):
        spans.begin("forward")  # an error before its end
        clock.now += 1
        raise ZeroDivisionError
    with spans.of("log"):
        clock.now += 3
    assert spans.take().seconds() == {
        "sync": 14, "sync/gather": 4, "sync/send": 10, "sync/unaccounted": 0,
        "update": 1, "update/forward": 1, "update/unaccounted": 0,
        "log": 3, "unaccounted": 0,
    }  # fmt: skip


def test_other_tracks_overlap_and_are_no_part_of_the_sum():
    clock = Clock()
    spans = Spans(clock)
    with spans.of("generate"), spans.on("server 0", "prompt 3", samples=8) as first:
        clock.now += 1
        with pytest.raises(TimeoutError), spans.on("server 0", "prompt 4"):
            clock.now += 2
            raise TimeoutError
        first["response_tokens"] = 50
    stretch = spans.take()
    assert stretch.seconds() == {"generate": 3, "unaccounted": 0}
    assert stretch.spans == [
        Span("prompt 4", 1001, 1003, "server 0", {"error": "TimeoutError"}),
        Span("prompt 3", 1000, 1003, "server 0", {"samples": 8, "response_tokens": 50}),
        Span("generate", 1000, 1003),
    ]


def test_the_clock_is_the_one_that_never_jumps():
    before = time.monotonic()
    spans = Spans()
    assert before <= spans.take().start <= spans.take().start <= time.monotonic()


def test_nothing_is_taken_while_it_goes_on():
    spans = Spans()
    open_ones = "update/optimizer is not done"
    with pytest.raises(AssertionError, match=open_ones), spans.of("update"), spans.of("optimizer"):
        spans.take()
