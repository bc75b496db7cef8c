"""What stops a run says which tokens, from where, and why."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import CHARACTERS, SPECIAL

from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.gap_report import describe_gap, describe_token, tokens_of
from megatron_opo.recipe_file import load_recipe

URLS = ("http://a:1", "http://b:1")


def decode(ids: tuple[int, ...]) -> str:
    return "".join((*SPECIAL, *CHARACTERS)[i] for i in ids)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(len(SPECIAL) + CHARACTERS.index(each) for each in text)


def sample(group: str, index: int, text: str, **more) -> Sample:
    ids = ids_of(text)
    versions = tuple(7 + (i > 0) for i in range(len(ids)))
    answer = Sample(group, index, ids, (-1.0,) * len(ids), versions, "stop", text, **more)
    return replace(answer, server=URLS[index % 2])


@pytest.fixture
def groups() -> list[Group]:
    """The first sample has no reward: it is no part of the batch."""
    texts = ("1+1=", "a")
    prompts = [Prompt(str(k), ids_of(text), text, "d", None) for k, text in enumerate(texts)]
    return [
        Group(prompts[0], (sample("0", 0, "3"), sample("0", 1, "22", reward=1.0))),
        Group(
            prompts[1],
            (
                sample("1", 0, "bcd", reward=0.0, loss_mask=(True, False, True)),
                sample("1", 1, "e", reward=1.0, cached_tokens=1),
            ),
        ),
    ]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: x\nrun_dir: {tmp_path}\nmodel: {{path: x, dtype: float32}}\n"
        "data: {train: {files: [x.jsonl]}}\n"
    )
    return load_recipe(path)


def scores_of(batch, gaps) -> SimpleNamespace:
    logprobs = batch.rollout_logprobs.clone()
    logprobs[batch.loss_mask] -= torch.tensor(gaps)
    uniform = torch.full_like(logprobs, 4.0)
    return SimpleNamespace(logprobs=logprobs, entropy=uniform, sum_squared_probs=0.02 * uniform)


def test_tokens_have_their_places_and_servers(groups):
    batch = pack(groups)
    gaps = [0.1, 0.2, 0.3, 0.4, 0.5]
    samples = [each for group in groups for each in group.samples]
    tokens, servers = tokens_of(batch, scores_of(batch, gaps), samples)
    assert servers == list(URLS)
    assert tokens.position.tolist() == [4, 5, 1, 3, 1]
    assert tokens.place.tolist() == [0, 1, 0, 2, 0]
    assert tokens.origin.tolist() == [1, 1, 0, 0, 1]
    assert tokens.cached.tolist() == [False, False, False, False, True]
    assert (tokens.server - tokens.actor).tolist() == pytest.approx(gaps)


def test_a_token_is_shown_with_its_text_server_and_version(groups):
    batch = pack(groups)
    samples = [each for group in groups for each in group.samples]
    line = describe_token(batch, scores_of(batch, [0.5] * 5).logprobs, 5, samples, decode)
    token = ids_of("2")[0]
    assert line == (
        f"  sample 1, position 5, token {token} '2' after '1+1=2': actor -1.50000, server "
        "-1.00000, sampled by http://b:1 as version 8"
    )


def test_the_worst_tokens_come_first_and_none_of_the_prompt(groups, recipe):
    batch = pack(groups)
    scores = scores_of(batch, [0.1, 3.0, 0.2, 0.3, 0.4])
    text = describe_gap(batch, scores, groups, recipe, decode, "")
    first, *lines = text.splitlines()
    assert "max 3 (allowed algorithm.max_logprob_gap 0.5)" in first
    assert [line.split(",")[0] for line in lines[:5]] == [
        f"  sample {number}" for number in (1, 3, 2, 2, 1)
    ]
    assert lines[-2].startswith("The gaps show no known pattern, and are no rounding in float32.")
    assert lines[-1] == "The servers hold the weights that they were sent: compared once more."


def test_other_weights_on_a_server_are_said_before_anything_else(groups, recipe):
    batch = pack(groups)
    scores = scores_of(batch, [3.0] * 5)
    text = describe_gap(batch, scores, groups, recipe, decode, "server 1: 3 weights differ")
    assert "Servers hold other weights than they were sent:\nserver 1: 3 weights differ" in text
    assert "no pattern" not in text


def test_a_batch_of_unknown_origin_is_described_all_the_same(groups, recipe):
    batch = pack(groups)
    text = describe_gap(batch, scores_of(batch, [3.0] * 5), [], recipe, None, None)
    assert "sample 1, position 4, token" in text
    assert "sampled by" not in text and "once more" not in text
