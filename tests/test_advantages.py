"""Advantages of a packed rollout: what trains, on which tokens, and what siblings feel of it."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from megatron_opo.advantages import NEEDS_SCORES, baselines, estimators, group_advantages_
from megatron_opo.advantages.advice import contradictions
from megatron_opo.advantages.truncation import shape_rewards
from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.errors import RewardError
from megatron_opo.recipe import AlgorithmConfig, Estimator, Recipe

ESTIMATORS = get_args(Estimator)
OVER_GROUPS = ("opo", "opo_leave_one_out", "opo_energy", "otb", "rloo", "grpo", "dr_grpo", "remax")


def make_group(group_id, prompt_length, rewards_and_lengths, cut=(), greedy=0.5):
    """`cut`: indices of the samples that ended at the limit."""
    prompt = Prompt(group_id, tuple(range(prompt_length)), "", "test", None)

    def sample(index, reward, length):
        finish = "length" if index in cut else "stop"
        ids, logprobs, versions = (5,) * length, (-0.5,) * length, (0,) * length
        return Sample(group_id, index, ids, logprobs, versions, finish, "", reward=reward)

    samples = tuple(sample(i, r, n) for i, (r, n) in enumerate(rewards_and_lengths))
    return Group(prompt, samples, greedy=sample(len(samples), greedy, 3))


def advantages_of(groups, estimator, singleton="zero"):
    """By sample id: its tokens' advantages."""
    batch = pack(groups)
    batch.advantages.fill_(99)
    # A token's energy depends on its place in its own sample only, wherever that stands.
    places = torch.cat([torch.arange(n) for n in batch.sequence_lengths.tolist()])
    energies = 0.1 + places.double().remainder(7) / 10 if estimator in NEEDS_SCORES else None
    group_advantages_(batch, estimator, singleton, energies)
    assert (batch.advantages[~batch.loss_mask] == 0).all()
    parts = batch.advantages[batch.loss_mask].split(batch.response_lengths.tolist())
    return dict(zip(batch.sample_ids.tolist(), [p.tolist() for p in parts], strict=True))


def test_token_advantages_cover_the_response_only_and_skip_unscorable_members():
    groups = [
        make_group("a", 3, [(1.0, 1), (None, 50), (0.0, 3)]),
        make_group("b", 2, [(2.0, 2), (2.0, 4)]),
    ]
    batch = pack(groups)
    batch.advantages.fill_(99)
    group_advantages_(batch)
    # Group a: the unscorable member counts neither in numerator nor denominator, b = 1/4.
    a = [0, 0, 0, 0.75, 0, 0, 0, -0.25, -0.25, -0.25]
    b = [0] * (2 + 2 + 2 + 4)
    assert batch.advantages.tolist() == a + b
    assert batch.sample_ids.tolist() == [0, 2, 3, 4]
    assert batch.group_offsets.tolist() == [0, 2, 4]


def test_a_reward_that_is_not_finite_is_refused_with_its_sample():
    batch = pack([make_group("a", 1, [(1.0, 1), (float("nan"), 2)])])
    with pytest.raises(RewardError, match=r"samples \[1\]"):
        group_advantages_(batch)


def test_an_unscorable_rollout_is_refused():
    with pytest.raises(RewardError, match="none of the 2 samples"):
        pack([make_group("a", 1, [(None, 1), (None, 2)])])


GROUPS = [
    make_group("a", 3, [(1.0, 4), (0.0, 9), (None, 5), (0.25, 0), (1.0, 2)]),
    make_group("b", 1, [(None, 3), (-1.5, 6), (2.0, 6)], greedy=None),
    make_group("c", 2, [(None, 3), (2.0, 2)]),
    make_group("d", 2, [(0.1, 3), (0.1, 2), (0.1, 8)], greedy=0.1),
]


@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e not in NEEDS_SCORES])
def test_every_loss_token_gets_the_advantage_of_its_sequence(estimator, singleton):
    batch = pack(GROUPS)
    lengths, offsets = batch.response_lengths, batch.group_offsets
    assert lengths.tolist() == [4, 9, 0, 2, 6, 6, 2, 3, 2, 8]
    assert offsets.tolist() == [0, 4, 6, 7, 10]
    extra = {}
    if estimator == "remax":
        extra["greedy_rewards"] = torch.tensor([0.5, torch.nan, 0.5, 0.1], dtype=torch.float64)
    expected = getattr(estimators, estimator)(batch.rewards, lengths, offsets, singleton, **extra)
    got = advantages_of(GROUPS, estimator, singleton)
    for sample, advantage, length in zip(got, expected.float().tolist(), lengths, strict=True):
        assert got[sample] == [advantage] * length


@pytest.mark.parametrize("estimator", ["opo_energy", "otb"])
def test_energies_are_those_of_loss_tokens(estimator):
    """Prompt tokens, whose energies would shift every weight, lie between the responses."""
    groups = [make_group("a", 5, [(1.0, 2), (0.0, 3)])]
    batch = pack(groups)
    energies = torch.full((batch.tokens.numel(),), 1e6, dtype=torch.float64)
    energies[batch.loss_mask] = torch.tensor([0.5, 0.5, 0.75, 0.75, 0.75]).double()
    group_advantages_(batch, estimator, energies=energies)
    got = batch.advantages[batch.loss_mask].tolist()
    if estimator == "otb":
        assert got == pytest.approx([0.6, 0.6, -0.4, -0.4, 0])
    else:
        assert got == pytest.approx([9 / 13] * 2 + [-4 / 13] * 3)


def test_token_baselines_count_loss_tokens_not_places():
    """Tokens that were not sampled lie inside of a response; the last ones share a baseline."""
    batch = pack([make_group("a", 1, [(1.0, 5), (0.0, 4)])])
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    batch = replace(batch, loss_mask=mask)
    group_advantages_(batch, "otb", energies=torch.ones(11))
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0, -0.5, -0.5, -0.5, 0]


@pytest.mark.parametrize("estimator", OVER_GROUPS)
def test_other_groups_do_not_change_a_groups_advantages(estimator):
    """So neither does dynamic sampling, which takes groups out."""
    together = advantages_of(GROUPS, estimator)
    first = 0
    for group in GROUPS:
        for sample, tokens in advantages_of([group], estimator).items():
            assert together[first + sample] == tokens
        first += len(group.samples)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_masked_response_moves_its_siblings_as_if_it_had_not_been_sampled(estimator):
    members = [(1.0, 4), (0.0, 12), (0.0, 2), (0.5, 12)]
    masked = AlgorithmConfig(truncated="mask")
    group, other = make_group("a", 2, members, cut=[1, 3]), make_group("b", 1, [(1.0, 3), (0.0, 5)])
    shaped = shape_rewards([group, other], masked, 12)
    without = [group.with_samples(group.samples[i] for i in (0, 2)), other]
    got, expected = advantages_of(shaped, estimator), advantages_of(without, estimator)
    assert list(got) == [0, 2, 4, 5]
    assert list(got.values()) == list(expected.values())
    assert "algorithm.truncated" in shaped[0].samples[1].reward_error


def test_penalised_responses_pay_for_the_tokens_near_the_limit():
    algorithm = AlgorithmConfig(truncated="penalise", overlong_buffer=4, overlong_factor=0.5)
    lengths = (1, 16, 17, 18, 20)
    group = make_group("a", 1, [(1.0, n) for n in lengths] + [(None, 20)], cut=[4, 5], greedy=0.0)
    (shaped,) = shape_rewards([group], algorithm, max_response_tokens=20)
    rewards = [sample.reward for sample in shaped.samples]
    assert rewards == [1, 1, 1 - 1 / 8, 1 - 2 / 8, 1 - 4 / 8, None]
    assert shaped.greedy.reward == 0


def test_the_greedy_response_is_shaped_like_the_others():
    algorithm = AlgorithmConfig(truncated="penalise", overlong_buffer=4, overlong_factor=1.0)
    group = make_group("a", 1, [(1.0, 1)], greedy=1.0)
    (shaped,) = shape_rewards([group], algorithm, max_response_tokens=4)
    assert shaped.greedy.reward == 1 - 3 / 4
    cut = replace(group, greedy=replace(group.greedy, finish_reason="length"))
    (masked,) = shape_rewards([cut], AlgorithmConfig(truncated="mask"), 4)
    assert masked.greedy.reward is None


def test_kept_responses_keep_their_rewards():
    group = make_group("a", 1, [(1.0, 12), (0.0, 3)], cut=[0])
    assert shape_rewards([group], AlgorithmConfig(), 12) == [group]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("opo", [4 / 13] * 2),
        ("opo_leave_one_out", [0, 1]),
        ("dr_grpo", [1 / 2] * 2),
        ("rloo", [0, 1]),
        ("remax", [1 / 4] * 2),
        # Scaled ones: what they subtract before.
        ("grpo", [1 / 2] * 2),
        ("reinforce_plus_plus", [4 / 13] * 2),
        ("reinforce_plus_plus_baseline", [1 / 2] * 2),
        ("opo_whitened", [4 / 13] * 2),
        ("opo_batch", [4 / 13] * 2),
        # Token 1 to 4 have baseline 1/2; later ones of the longer response are alone.
        ("otb", [1 / 2, (4 * (1 / 2) + 5 * 0) / 9]),
    ],
)
def test_baselines_are_what_was_subtracted(estimator, expected):
    batch = pack([make_group("a", 2, [(1.0, 4), (0.0, 9), (None, 3)], greedy=0.25)])
    group_advantages_(batch, estimator, energies=torch.ones(batch.tokens.numel()))
    assert baselines(batch, estimator).tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("estimator", ["opo", "grpo", "remax"])
def test_no_estimator_takes_a_reward_that_is_not_finite(estimator, value):
    batch = pack([make_group("a", 1, [(1.0, 1), (None, 2), (value, 2)])])
    with pytest.raises(RewardError, match=r"samples \[2\] of the rollout they are \["):
        group_advantages_(batch, estimator)


def recipe(**sections) -> Recipe:
    data = {"train": {"files": ["train.jsonl"]}}
    return Recipe.model_validate({"name": "r", "model": {"path": "m"}, "data": data, **sections})


@pytest.mark.parametrize(
    ("estimator", "aggregation", "dynamic", "expected"),
    [
        ("opo", "token-mean", True, []),
        ("opo", "seq-mean-token-mean", True, ["1 / length"]),
        ("opo_leave_one_out", "seq-mean-token-mean", False, ["1 / length"]),
        ("otb", "seq-mean-token-sum", True, []),
        ("grpo", "seq-mean-token-mean", True, []),
        ("dr_grpo", "seq-mean-token-mean", False, ["seq-mean-token-sum-norm"]),
        ("reinforce_plus_plus", "token-mean", False, []),
        ("reinforce_plus_plus", "token-mean", True, ["the whole batch"]),
        ("opo_batch", "seq-mean-token-mean", True, ["1 / length", "the whole batch"]),
        ("remax", "token-mean", True, ["greedy"]),
    ],
)
def test_contradictory_choices_are_warned_of(estimator, aggregation, dynamic, expected):
    found = contradictions(
        recipe(
            algorithm={"estimator": estimator, "loss_aggregation": aggregation},
            rollout={"dynamic_sampling": {"enabled": dynamic}},
        )
    )
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("rloo_length_weighted", "opo_leave_one_out"),
        ("reinforce_plus_plus_baseline_length_weighted", "opo_whitened"),
        ("optimal_token_baseline", "otb"),
    ],
)
def test_other_names_of_an_estimator_are_understood(alias, name):
    assert recipe(algorithm={"estimator": alias}).algorithm.estimator == name
