from fractions import Fraction as F

import pytest
import torch

from megatron_opo.actor.loss import policy_gradient_loss, token_weights
from megatron_opo.batch import PackedBatch


def make_batch(prompt_and_response_lengths):
    mask = [m for p, r in prompt_and_response_lengths for m in [False] * p + [True] * r]
    zeros = torch.zeros(len(mask))
    return PackedBatch(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        loss_mask=torch.tensor(mask),
        rollout_logprobs=zeros,
        advantages=zeros,
        cu_seqlens=torch.tensor([0, *(p + r for p, r in prompt_and_response_lengths)]).cumsum(0),
        group_offsets=torch.tensor([0, len(prompt_and_response_lengths)]),
        rewards=torch.zeros(len(prompt_and_response_lengths)),
        sample_ids=torch.arange(len(prompt_and_response_lengths)),
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", F(9, 5)),
        ("seq-mean-token-sum", F(9, 2)),
        ("seq-mean-token-mean", F(3)),
        ("seq-mean-token-sum-norm", F(9, 2) / 8),
    ],
)
def test_each_aggregation_of_unequal_responses(aggregation, expected):
    """Token losses (1, 1, 1, 1) and (5): a mean of micro-batch means would give 3 for the first."""
    batch = make_batch([(2, 4), (3, 1)])
    losses = torch.tensor([9.0, 9, 1, 1, 1, 1, 9, 9, 9, 5])
    weights = token_weights(batch, aggregation, horizon=8)
    assert (weights * losses).sum().item() == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("sequences", [[0, 1, 2], [2, 0, 1], [1]])
def test_weights_are_set_before_the_batch_is_split(sequences):
    batch = make_batch([(1, 2), (0, 7), (4, 1)])
    weights = token_weights(batch, "seq-mean-token-mean", horizon=8)
    parts = [weights[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in sequences]
    for part in parts:
        assert part.sum().item() == pytest.approx(1 / 3)


def test_the_gradient_is_that_of_minus_advantage_times_logprob():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages, weights = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.1, 0.2, 0.3])
    loss = policy_gradient_loss(logprobs, advantages, weights)
    loss.backward()
    # The ratio is exactly 1, so the value is the weighted sum of advantages to the bit.
    assert loss.item() == -(weights * advantages).sum().item()
    assert torch.equal(logprobs.grad, -(weights * advantages))
