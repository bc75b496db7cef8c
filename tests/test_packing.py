"""What each context-parallel rank gets of a micro-batch: every token once, every score once."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.actor.packing import Sharing, make_micro_batch
from megatron_opo.batch import PackedBatch


def make_batch(lengths: list[int], masked: set[int]) -> PackedBatch:
    """Tokens that are numbered from 1; all but the first of each sequence and `masked` ones are
    scored."""
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(total, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    mask[[place for place in masked if place < total]] = False
    nothing = torch.zeros(total)
    return PackedBatch(
        tokens=torch.arange(1, total + 1),
        loss_mask=mask,
        rollout_logprobs=nothing,
        advantages=nothing,
        cu_seqlens=cu_seqlens,
        group_offsets=torch.tensor([0, len(lengths)]),
        rewards=torch.zeros(len(lengths)),
        sample_ids=torch.arange(len(lengths)),
    )


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    masked=st.sets(st.integers(0, 60)),
    ranks=st.integers(1, 4),
    split=st.integers(1, 4),
    data=st.data(),
)
def test_ranks_have_every_token_once_and_score_each_where_the_one_before_it_is(
    lengths, masked, ranks, split, data
):
    batch = make_batch(lengths, masked)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    parts = [make_micro_batch(batch, chosen, Sharing(rank, ranks, split)) for rank in range(ranks)]
    bounds = batch.cu_seqlens.tolist()
    places = {place for i in chosen for place in range(bounds[i], bounds[i + 1])}

    assert all(torch.equal(part.cu_seqlens, parts[0].cu_seqlens) for part in parts)
    whole = parts[0].cu_seqlens.diff().tolist()
    sizes = {len(part.tokens) for part in parts}
    assert sizes == {sum(whole) // ranks} and sum(whole) > 0
    assert sum(whole) % (ranks * split) == 0
    if ranks > 1:
        assert all(length % (2 * ranks) == 0 for length in whole)
    # No more dummies than it takes.
    for i, length in zip(chosen, whole, strict=False):
        assert 0 <= length - lengths[i] < (2 * ranks if ranks > 1 else 1)
    assert len(whole) - len(chosen) in (0, 1)
    if not chosen:
        assert whole == [parts[0].tokens.numel() * ranks]

    tokens = torch.cat([part.tokens for part in parts]).tolist()
    assert sorted(token for token in tokens if token) == sorted(place + 1 for place in places)
    scored = torch.cat([part.places for part in parts]).tolist()
    assert sorted(scored) == [place for place in sorted(places) if batch.loss_mask[place]]
    of_place = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for part in parts:
        assert torch.equal(part.targets, part.places + 1)
        assert [chosen[i] for i in part.sequences] == of_place[part.places].tolist()
        assert torch.equal(part.tokens[part.rows], part.targets - 1)


def test_the_order_is_that_of_the_docstring():
    """Two ranks, chunks of two tokens: the first and the last chunk, and those between."""
    batch = make_batch([7, 3], set())
    first, second = (make_micro_batch(batch, [0, 1], Sharing(rank, 2)) for rank in (0, 1))
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 8, 12]
    assert first.tokens.tolist() == [1, 2, 7, 0, 8, 0]
    assert second.tokens.tolist() == [3, 4, 5, 6, 9, 10]
    # The last token of a chunk is scored by the next one's, which the other rank may have.
    assert first.targets.tolist() == [2, 3, 9]
    assert second.targets.tolist() == [4, 5, 6, 7, 10]
    assert [b - a for a, b in pairwise(second.rows.tolist())] == [1, 1, 1, 1]


def test_one_rank_packs_without_dummies():
    batch = make_batch([3, 2, 4], {1})
    packed = make_micro_batch(batch, [2, 0])
    assert packed.tokens.tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 4, 7]
    assert packed.rows.tolist() == [0, 1, 2, 5]
    assert packed.places.tolist() == [6, 7, 8, 2]
