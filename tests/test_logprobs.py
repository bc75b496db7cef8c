import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.actor.logprobs import token_logprobs


def reference(hidden, weight, targets, temperature, vocab_size):
    """Whole logits, in float64."""
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)
    p = log_p.exp()
    return log_p.gather(-1, targets[:, None])[:, 0], -(p * log_p).sum(-1), p.square().sum(-1)


@settings(deadline=None, max_examples=50)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    padding=st.integers(0, 3),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_match_whole_logits_in_float64(
    tokens, chunk, temperature, padding, scale, seed
):
    generator = torch.Generator().manual_seed(seed)
    vocab_size, width = 13, 6
    hidden = torch.randn(tokens, width, generator=generator) * scale
    weight = torch.randn(vocab_size + padding, width, generator=generator)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    cotangent = torch.randn(tokens, generator=generator)

    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    got = token_logprobs(
        *inputs, targets, temperature=temperature, vocab_size=vocab_size, chunk_tokens=chunk
    )
    grads = torch.autograd.grad(got.logprobs @ cotangent, inputs)

    exact_inputs = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = reference(*exact_inputs, targets, temperature, vocab_size)
    exact_grads = torch.autograd.grad(exact[0] @ cotangent.double(), exact_inputs)

    for value, truth in zip(got, exact, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=2e-5, atol=2e-5 * max(1, scale))
    for value, truth in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(
            value.double(), truth, rtol=1e-4, atol=1e-4 * max(1, scale) / temperature
        )


def test_temperature_scales_the_logits():
    # Logits (2, 0) at T = 0.5: log p_0 = -log(1 + e^-4).
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    got = token_logprobs(
        hidden, weight, torch.tensor([0]), temperature=0.5, vocab_size=2, chunk_tokens=1
    )
    assert got.logprobs.item() == pytest.approx(-0.0181499, abs=1e-6)


def test_padding_rows_get_no_probability_however_large():
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[0.0], [0.0], [1000.0]])
    got = token_logprobs(
        hidden, weight, torch.tensor([1]), temperature=1.0, vocab_size=2, chunk_tokens=4
    )
    assert got.logprobs.item() == pytest.approx(-0.6931472, abs=1e-6)
    assert got.entropy.item() == pytest.approx(0.6931472, abs=1e-6)


def test_entropy_of_a_certain_token_is_zero_not_nan():
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[500.0], [0.0]])
    got = token_logprobs(
        hidden, weight, torch.tensor([0]), temperature=1.0, vocab_size=2, chunk_tokens=1
    )
    assert [got.logprobs.item(), got.entropy.item(), got.sum_squared_probs.item()] == [0, 0, 1]
