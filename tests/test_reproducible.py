"""Real servers give the same tokens and logprobs, to the bit, whatever else they do."""

import threading
import urllib.request

import pytest
import torch
from servers import ask, prompts

from megatron_opo.batch import Prompt

pytestmark = pytest.mark.usefixtures("both_launched")

G = 3
LENGTH = 16
LAST_ID = 99
TEXT = [4 + (13 * i * i + 5 * i) % 90 for i in range(150)]


def all_prompts() -> list[Prompt]:
    """Short and long ones; some begin as others do."""
    long = [Prompt(f"l{n}", tuple(TEXT[:n]), "", "test", None) for n in (1, 2, 31, 32, 33, 70, 150)]
    return prompts(9) + long


def draw(rollout, asked, version, **settings):
    """{(prompt, sample): its tokens and logprobs}; `version` counts for the seeds only."""
    settings = {"samples_per_prompt": G, "temperature": 1.0} | settings
    groups = rollout.generate(
        asked, version=version, max_response_tokens=LENGTH, require_version=False, **settings
    )
    return {
        (group.prompt.id, one.index): (one.response_ids, one.logprobs)
        for group in groups
        for one in group.samples
    }


def flush(server):
    url, headers = server.url + "/flush_cache", server.headers
    request = urllib.request.Request(url, method="POST", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"flushed" in answer.read()


def test_a_prompt_is_computed_once_for_its_group_and_that_changes_nothing(
    rollout, reference, qwen_pool
):
    asked = all_prompts()
    for server in qwen_pool.servers:
        flush(server)
    assert draw(rollout, asked, 1) == reference
    long = sum(G * (len(p.token_ids) - 1) for p in asked if len(p.token_ids) >= 32)
    assert long <= rollout.stats.cached_tokens < rollout.stats.read_tokens
    # As where a server keeps no prompts; this one finds those of before only.
    for server in qwen_pool.servers:
        flush(server)
    rollout._caches_prompts = False
    assert draw(rollout, asked, 1) == reference
    assert rollout.stats.cached_tokens < long
    rollout._caches_prompts = True


def part(drawn, other):
    return {key: drawn[key] for key in other}


@pytest.fixture(scope="module")
def rollout(qwen_pool):
    rollout = qwen_pool.rollout()
    rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())
    return rollout


@pytest.fixture(scope="module")
def reference(rollout):
    """By both servers, in full batches."""
    drawn = draw(rollout, all_prompts(), 1)
    assert len({tokens for tokens, _ in drawn.values()}) == len(drawn)
    return drawn


def one_at_a_time(pool, server):
    rollout = pool.rollout([pool.servers[server]], max_concurrent_requests=1)
    rollout.needs_sync = False
    return rollout


@pytest.mark.parametrize("server", [0, 1])
def test_alone_as_in_a_full_batch_on_any_server(reference, qwen_pool, server):
    for asked in (all_prompts()[::-2], all_prompts()[::3]):
        drawn = draw(one_at_a_time(qwen_pool, server), asked, 1, samples_per_prompt=1)
        assert drawn == part(reference, drawn)
        flush(qwen_pool.servers[server])


def test_after_a_sync_of_the_same_weights(reference, rollout, qwen_pool):
    rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())
    assert draw(rollout, all_prompts()[::-1], 1) == reference


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"top_p": 0.7}, {"temperature": 0.0}])
def test_beside_other_kinds_of_requests(rollout, qwen_pool, settings):
    """A server takes other ways where requests in one batch want different things."""
    quiet = draw(one_at_a_time(qwen_pool, 0), prompts(4), 2, **settings)
    done = threading.Event()

    def others():
        kinds = ({"temperature": 0}, {"top_p": 0.3}, {"top_k": 4, "min_p": 0.1})
        while not done.is_set():
            parameters = [{"max_new_tokens": 20, **kind} for kind in kinds]
            ask(
                qwen_pool.servers[0],
                "/generate",
                {"input_ids": [TEXT[:40]] * len(kinds), "sampling_params": parameters},
            )

    beside = threading.Thread(target=others)
    beside.start()
    try:
        assert draw(one_at_a_time(qwen_pool, 0), prompts(4), 2, **settings) == quiet
    finally:
        done.set()
        beside.join()


def test_over_two_ranks(llama_pool):
    together = draw(llama_pool.rollout(), all_prompts(), 1)
    flush(llama_pool.servers[0])
    drawn = draw(one_at_a_time(llama_pool, 0), all_prompts()[::3], 1, samples_per_prompt=1)
    assert drawn == part(together, drawn)


def test_a_sampled_token_has_the_logprob_that_a_prefill_gives_it(reference, rollout):
    asked = {prompt.id: prompt for prompt in all_prompts()}
    # SGLang mistakes the last id of the vocabulary for padding in a text.
    keys = [(name, 0) for name in asked if LAST_ID not in reference[name, 0][0]]
    assert len(keys) > 5
    texts = [[*asked[name].token_ids, *reference[name, 0][0]] for name, _ in keys]
    for key, text, scored in zip(keys, texts, rollout.score_tokens(texts), strict=True):
        logprobs = reference[key][1]
        assert len(scored) == len(text) - 1
        assert tuple(scored[-len(logprobs) :]) == logprobs


def test_another_seed_draws_other_samples(reference, rollout, qwen_pool):
    others = [
        draw(rollout, all_prompts(), 2),
        draw(rollout, all_prompts(), 1, purpose="eval"),
    ]
    for other in others:
        assert sum(other[key][0] == reference[key][0] for key in reference) <= 2
    first = torch.tensor([tokens[0] for tokens, _ in reference.values()])
    assert len(first.unique()) > G
