"""Each fault is recognised in the logprobs of a model that really has it; rounding is none."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from models import tiny_llama
from transformers import AutoModelForCausalLM

from megatron_opo.gap_causes import Tokens, causes

PROMPT_LENGTHS = (1, 3, 8)
SAMPLES, RESPONSE = 16, 56
WINDOW = 24
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OTHER_THETA = {"rope_type": "default", "rope_theta": 5e4}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class World:
    """What a server with `model` sampled to prompts of several lengths, and the logprobs that it
    found while it decoded; each [N, L] or [N, response]."""

    model: torch.nn.Module
    directory: Path
    ids: list[torch.Tensor]
    told: list[torch.Tensor]


def load(directory: Path, dtype=torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def decode(model, ids: torch.Tensor, generator) -> tuple[torch.Tensor, torch.Tensor]:
    cache, step, told = None, ids, []
    for _ in range(RESPONSE):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logs = out.logits[:, -1].log_softmax(-1)
        step = torch.multinomial(logs.exp(), 1, generator=generator)
        told.append(logs.gather(1, step))
        ids = torch.cat([ids, step], 1)
    return ids, torch.cat(told, 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    directory = tiny_llama(tmp_path_factory.mktemp("gap") / "plain", rope_parameters=PLAIN)
    model = load(directory)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 100, (SAMPLES, n), generator=generator) for n in PROMPT_LENGTHS]
    ids, told = zip(*(decode(model, each, generator) for each in prompts), strict=True)
    return World(model, directory, list(ids), list(told))


def perturbed(world: World, scale: float) -> torch.nn.Module:
    """What the model may have been some updates ago."""
    model = load(world.directory)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += scale * parameter.data.std().nan_to_num() * noise
    return model


def tied(world: World) -> torch.nn.Module:
    model = load(world.directory)
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    return model


@torch.no_grad()
def logprobs(model, world: World, temperature: float = 1.0) -> list[torch.Tensor]:
    """Of each group [N, response, V], in one pass."""
    return [
        (model(ids).logits[:, -RESPONSE - 1 : -1].float() / temperature).log_softmax(-1).double()
        for ids in world.ids
    ]


@torch.no_grad()
def windowed(world: World) -> list[torch.Tensor]:
    """The logprobs [N, response] of a server that sees the last WINDOW tokens only."""
    found = []
    for ids in world.ids:
        columns = [
            world.model(ids[:, max(0, end - WINDOW) : end])
            .logits[:, -1]
            .log_softmax(-1)
            .gather(1, ids[:, end : end + 1])
            for end in range(ids.shape[1] - RESPONSE, ids.shape[1])
        ]
        found.append(torch.cat(columns, 1))
    return found


def own(world: World, logs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        each.gather(-1, ids[:, -RESPONSE:, None])[..., 0]
        for each, ids in zip(logs, world.ids, strict=True)
    ]


def tokens(world: World, actor_logs: list[torch.Tensor], server=None) -> Tokens:
    """`server` are the logprobs that were told, those of the world if there are no others."""
    logs = torch.cat(actor_logs)
    place = torch.arange(RESPONSE).expand(len(logs), RESPONSE)
    starts = torch.tensor(PROMPT_LENGTHS).repeat_interleave(SAMPLES)
    return Tokens(
        actor=torch.cat(own(world, actor_logs)).flatten(),
        server=torch.cat(server or world.told).double().flatten(),
        entropy=-(logs.exp() * logs).sum(-1).flatten(),
        sum_squared_probs=logs.exp().square().sum(-1).flatten(),
        position=(starts[:, None] + place).flatten(),
        place=place.flatten(),
        origin=torch.zeros(place.numel(), dtype=torch.int64),
        cached=torch.zeros(place.numel(), dtype=torch.bool),
    )


def found(tokens: Tokens, temperature: float = 1.0, dtype: str = "float32") -> list[str]:
    return causes(tokens, ["http://a", "http://b"], temperature=temperature, dtype=dtype)


@pytest.fixture(scope="module")
def right(world) -> Tokens:
    """A server that decodes, a trainer that does not, and nothing wrong."""
    return tokens(world, logprobs(world.model, world))


@pytest.fixture(scope="module")
def stale(world) -> Tokens:
    return tokens(world, logprobs(perturbed(world, 0.02), world))


def test_rounding_of_a_decode_and_a_whole_pass_shows_nothing(right):
    assert (right.server != right.actor).any(), "there is some"
    assert found(right) == []


def test_rounding_of_a_coarse_dtype_shows_nothing(world):
    coarse = tokens(world, logprobs(load(world.directory, torch.bfloat16), world))
    assert (coarse.server - coarse.actor).abs().max() > 0.02, "there is some"
    assert found(coarse, dtype="bfloat16") == []


def test_noise_of_any_kind_shows_nothing(right):
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        generator.manual_seed(seed)
        noise = torch.randn(len(right), generator=generator).double()
        outliers = (torch.rand(len(right), generator=generator) < 0.01) * 8 + 1
        origin = torch.randint(2, (len(right),), generator=generator)
        cached = torch.rand(len(right), generator=generator) < 0.5
        made = replace(
            right, server=right.actor + 0.02 * noise * outliers, origin=origin, cached=cached
        )
        assert found(made, dtype="bfloat16") == []


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.25])
def test_another_temperature_is_found_and_told(world, temperature):
    text = found(tokens(world, logprobs(world.model, world, temperature)), temperature)[0]
    told = re.search(r"told logprobs at ([\d.]+), where the recipe samples at ([\d.]+)\. ", text)
    assert float(told[1]) == pytest.approx(1.0, rel=0.06)
    assert float(told[2]) == temperature


@pytest.mark.parametrize("rope", [OTHER_THETA, SCALED], ids=["theta", "scaling"])
def test_other_angles_are_found_where_the_gap_grows(world, rope, tmp_path):
    model = load(tiny_llama(tmp_path / "other", rope_parameters=rope))
    (text,) = found(tokens(world, logprobs(model, world)))
    assert "grows with the position" in text and "rope_theta" in text


def test_a_tied_output_layer_is_another_model(world):
    (text,) = found(tokens(world, logprobs(tied(world), world)))
    assert "little to do with each other" in text and "tie_word_embeddings" in text


def test_older_weights_are_other_weights(stale):
    (text,) = found(stale)
    assert "other weights (an update that the servers missed" in text


def test_one_server_with_older_weights_is_named(right, stale):
    is_b = torch.arange(len(right)) // RESPONSE % 2 == 1
    mixed = replace(right, actor=torch.where(is_b, stale.actor, right.actor), origin=is_b.long())
    first, second = found(mixed)
    assert "http://b" in first and "http://a" not in first
    assert "other weights" in second


@pytest.mark.parametrize(
    ("is_wrong", "text"),
    [
        (lambda each: each.place > 0, "those after it do not"),
        (lambda each: each.place == 0, "those after it agree"),
        (lambda each: each.cached, "found in its cache"),
    ],
    ids=["decode", "prefill", "cache"],
)
def test_only_one_way_of_computing_is_wrong(right, stale, is_wrong: Callable, text):
    cached = torch.arange(len(right)) // RESPONSE % 3 == 1
    right = replace(right, cached=cached)
    mixed = replace(right, actor=torch.where(is_wrong(right), stale.actor, right.actor))
    (said,) = found(mixed)
    assert text in said


def test_a_window_is_found_where_it_begins(world):
    (text,) = found(tokens(world, logprobs(world.model, world), windowed(world)))
    onset = int(re.search(r"up to about position (\d+)", text)[1])
    assert WINDOW <= onset <= WINDOW + 8


def test_a_few_tokens_are_called_few(right):
    server = right.server.clone()
    server[torch.arange(0, len(right), 200)] -= 3
    (text,) = found(replace(right, server=server))
    assert re.match(r"only \d+ of \d+ tokens differ", text)


def test_too_few_tokens_show_nothing(stale):
    assert found(stale.where(torch.arange(20))) == []


def test_logprobs_that_are_no_numbers_are_left_to_others(right):
    server = right.server.clone()
    server[::7] = torch.nan
    server[::11] = -torch.inf
    assert found(replace(right, server=server)) == []
