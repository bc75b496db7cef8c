import math
from dataclasses import replace

import pytest
import torch

from megatron_opo.errors import OnPolicyError
from megatron_opo.on_policy import agreement_metrics, check_agreement, effective_share
from tests.test_loss import make_batch


@pytest.fixture
def batch():
    """Two responses of two tokens each behind prompts of two and one."""
    batch = make_batch([(2, 2), (1, 2)])
    return replace(batch, rollout_logprobs=torch.tensor([0, 0, -1.0, -2.0, 0, -3.0, -4.0]))


def actor_logprobs(batch, differences):
    logprobs = batch.rollout_logprobs.clone()
    logprobs[batch.loss_mask] += torch.tensor(differences)
    logprobs[~batch.loss_mask] = 7.0  # prompts carry no policy
    return logprobs


def test_gap_counts_sampled_tokens_only(batch):
    metrics = agreement_metrics(batch, actor_logprobs(batch, [0.0, 0.5, -0.25, 0.0]))
    assert metrics["on_policy/logprob_gap_max"] == 0.5
    assert metrics["on_policy/logprob_gap_mean"] == 0.1875
    assert metrics["on_policy/equal_tokens"] == 0.5
    expected = (math.exp(0.5) - 1 - 0.5 + math.exp(-0.25) - 1 + 0.25) / 4
    assert metrics["on_policy/kl"] == pytest.approx(expected)


def test_a_gap_within_the_bounds_passes(batch):
    logprobs = actor_logprobs(batch, [0.0, 0.0, 0.0, 0.5])
    metrics = check_agreement(batch, logprobs, max_gap=0.5, mean_gap=0.125)
    assert metrics["on_policy/logprob_gap_max"] == 0.5


@pytest.mark.parametrize(("max_gap", "mean_gap"), [(0.49, 1.0), (1.0, 0.124)])
def test_a_gap_past_either_bound_stops_and_names_the_worst_token(batch, max_gap, mean_gap):
    logprobs = actor_logprobs(batch, [0.0, 0.0, 0.0, 0.5])
    with pytest.raises(OnPolicyError) as caught:
        check_agreement(batch, logprobs, max_gap=max_gap, mean_gap=mean_gap)
    text = str(caught.value)
    first = text.splitlines()[1]
    assert "sample 1, position 2" in first
    assert "actor -3.50000, server -4.00000" in first
    assert "algorithm.max_logprob_gap" in text
    assert "No update was made" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_stops(batch, bad):
    with pytest.raises(OnPolicyError, match="sample 0, position 3"):
        check_agreement(
            batch, actor_logprobs(batch, [0.0, bad, 0.0, 0.0]), max_gap=1e9, mean_gap=1e9
        )


@pytest.mark.parametrize(
    ("weights", "share"),
    [([2.0, 2, 2], 1), ([1.0, 1, 0, 0], 0.5), ([3.0, 1], 16 / 20), ([0.0, 0], 0), ([1e-9], 1)],
)
def test_the_effective_share_of_samples_with_weights(weights, share):
    assert effective_share(torch.tensor(weights)) == pytest.approx(share, rel=1e-15)


def test_effective_shares_of_ratios_that_are_too_large_to_write_down(batch):
    equal = agreement_metrics(batch, actor_logprobs(batch, [0.0, 0.0, 0.0, 0.0]))
    assert equal["on_policy/ess_tokens"] == equal["on_policy/ess_sequences"] == 1
    metrics = agreement_metrics(batch, actor_logprobs(batch, [math.log(3), math.log(2), 0.0, 0.0]))
    assert metrics["on_policy/ess_tokens"] == pytest.approx(49 / (4 * 15))
    assert metrics["on_policy/ess_sequences"] == pytest.approx(49 / (2 * 37))
    metrics = agreement_metrics(batch, actor_logprobs(batch, [2000.0, 0.0, 0.0, 0.0]))
    assert metrics["on_policy/ess_tokens"] == 0.25
    assert metrics["on_policy/ess_sequences"] == 0.5
