"""Rotary frequencies against transformers', to the bit."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_opo.actor.rope import inverse_frequencies, token_angles
from megatron_opo.weights.hf_config import ROPES, read_architecture

THETAS = st.one_of(st.sampled_from([1e4, 5e5, 1e6, 1_000_000, 5_000_000]), st.floats(10, 1e8))
FACTORS = st.one_of(st.sampled_from([1, 4, 8, 32.0]), st.floats(1.0, 64.0))
CONTEXTS = st.sampled_from([64, 4096, 8192, 32_768])


@st.composite
def ropes(draw) -> dict:
    kind = draw(st.sampled_from(sorted(ROPES)))
    rope = {"rope_type": kind, "rope_theta": draw(THETAS)}
    if kind != "default":
        rope["factor"] = draw(FACTORS)
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw(CONTEXTS)
    if kind == "llama3":
        low = draw(st.floats(0.5, 4))
        rope |= {"low_freq_factor": low, "high_freq_factor": low * draw(st.floats(1.1, 8))}
    if kind == "yarn":
        if draw(st.booleans()):
            rope["attention_factor"] = draw(st.floats(0.5, 2))
        if draw(st.booleans()):
            slow = draw(st.floats(0.5, 4))
            rope |= {"beta_slow": slow, "beta_fast": slow * draw(st.floats(1, 40))}
    return rope


@given(rope=ropes(), head_dim=st.sampled_from([2, 16, 24, 64, 96, 128]))
@settings(max_examples=300, deadline=None)
def test_frequencies_and_factor_are_those_of_transformers_to_the_bit(rope, head_dim):
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131_072, vocab_size=8
    )
    reference = LlamaRotaryEmbedding(config)
    ours = read_architecture(config.to_dict()).rope
    assert torch.equal(inverse_frequencies(ours, head_dim), reference.inv_freq)
    assert ours.attention_factor == reference.attention_scaling


def test_published_llama_frequencies_fall_into_three_bands():
    """Llama 3.1 by hand: turns of more than 8192 tokens are 8 times as long, under 2048 kept."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(rope_parameters=rope, head_dim=128)
    scaled = inverse_frequencies(read_architecture(config.to_dict()).rope, 128).double()
    plain = torch.tensor([5e5 ** (-i / 64) for i in range(64)], dtype=torch.float64)
    turns = 2 * math.pi / plain
    ratio = plain / scaled
    torch.testing.assert_close(ratio[turns < 2048], torch.ones_like(ratio[turns < 2048]))
    torch.testing.assert_close(ratio[turns > 8192], torch.full_like(ratio[turns > 8192], 8.0))
    between = ratio[(turns > 2048) & (turns < 8192)]
    assert len(between) and ((between > 1) & (between < 8)).all()


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_positions_count_from_0_in_every_sequence(lengths):
    frequencies = torch.tensor([1.0, 0.25])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    angles = token_angles(frequencies, cu_seqlens)
    expected = [[p, p / 4, p, p / 4] for n in lengths for p in range(n)]
    assert angles.shape == (sum(lengths), 1, 1, 4)
    assert angles[:, 0, 0].tolist() == expected
