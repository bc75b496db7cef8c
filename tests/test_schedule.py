from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.actor.schedule import plan_micro_batches

lengths_strategy = st.lists(st.integers(1, 200), max_size=60)


@given(
    lengths=lengths_strategy,
    ranks=st.integers(1, 6),
    cap=st.integers(1, 300),
    multiple=st.integers(1, 5),
)
def test_invariants_of_the_plan(lengths, ranks, cap, multiple):
    plan = plan_micro_batches(lengths, ranks, cap, multiple)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert len(plan[0]) >= 1
    assert len(plan[0]) % multiple == 0
    # No more of them than the multiple asks for.
    assert len(plan[0]) - len(plan_micro_batches(lengths, ranks, cap)[0]) < multiple
    placed = [i for micro_batches in plan for batch in micro_batches for i in batch]
    assert sorted(placed) == list(range(len(lengths)))
    for micro_batches in plan:
        for batch in micro_batches:
            assert sum(lengths[i] for i in batch) <= cap or len(batch) == 1
        if any(not batch for batch in micro_batches):
            assert all(len(batch) <= 1 for batch in micro_batches)


@given(lengths=lengths_strategy, ranks=st.integers(1, 6), cap=st.integers(1, 300))
def test_the_plan_is_a_pure_function(lengths, ranks, cap):
    assert plan_micro_batches(lengths, ranks, cap) == plan_micro_batches(list(lengths), ranks, cap)


@given(length=st.integers(1, 100), per_rank=st.integers(1, 8), ranks=st.integers(1, 8))
def test_equal_sequences_are_spread_evenly(length, per_rank, ranks):
    plan = plan_micro_batches([length] * (per_rank * ranks), ranks, 1000)
    assert {sum(len(batch) for batch in micro_batches) for micro_batches in plan} == {per_rank}


def test_no_micro_batch_is_wasted():
    assert len(plan_micro_batches([50, 50, 40, 60], 1, 100)[0]) == 2
