"""Sampling from real servers: truth against transformers, and every fault retried or named."""

import dataclasses
import json
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from itertools import groupby
from operator import itemgetter

import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from servers import (
    API_KEY,
    DROP,
    FaultyProxy,
    ask,
    assert_sampled_from,
    perturbed,
    prompts,
    reference_logprobs,
    reported_versions,
)
from transformers import AutoTokenizer

from megatron_opo.batch import Prompt
from megatron_opo.errors import DataError, OnPolicyError, ServerError
from megatron_opo.rollout import ServersLostError
from megatron_opo.rollout.episode import Play

pytestmark = pytest.mark.usefixtures("both_launched")

G = 3
LENGTH = 6


@pytest.fixture(scope="module")
def current(qwen_pool):
    """The pool after a sync of its own weights: its rollout, weights and version."""
    rollout = qwen_pool.rollout()
    weights = qwen_pool.weights()
    version = qwen_pool.next_version()
    rollout.sync(iter(weights.items()), version)
    return rollout, weights, version


def sample(rollout, asked, version, temperature=1.0, **settings):
    settings = {"samples_per_prompt": G, "max_response_tokens": LENGTH} | settings
    return rollout.generate(asked, version=version, temperature=temperature, **settings)


def assert_whole(groups, asked, version, size=G):
    """No prompt lost, none twice, each with all of its samples, all of one version."""
    assert [group.prompt for group in groups] == asked
    for group in groups:
        assert [s.index for s in group.samples] == list(range(size))
        assert {s.group_id for s in group.samples} == {group.prompt.id}
        assert {v for s in group.samples for v in s.versions} == {version}
        assert all(1 <= s.length == len(s.logprobs) <= LENGTH for s in group.samples)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(current, qwen_pool, temperature):
    rollout, weights, version = current
    asked = prompts(12)
    groups = sample(rollout, asked, version, temperature, max_response_tokens=LENGTH)
    assert_whole(groups, asked, version)
    model = qwen_pool.reference(weights)
    for group in groups:
        for one in group.samples:
            expected = reference_logprobs(
                model, group.prompt.token_ids, one.response_ids, temperature
            )
            torch.testing.assert_close(
                torch.tensor(one.logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
            )
    assert len({s.server for group in groups for s in group.samples}) == 2


async def converse(episode):
    """Up to five tokens, an answer, a turn that a frequent character ends, another answer, the
    rest; what differs from sample to sample is how long the turns are."""
    episode.add("Q:")
    first = await episode.generate(max_tokens=5)
    episode.add(f"[{len(first.text)}]")
    second = await episode.generate(stop=["x", "7"], max_tokens=20)
    episode.add("<user>ok" if second.stop is None else f"<user>{second.stop}")
    await episode.generate()


def test_a_conversation_is_of_the_policys_own_tokens_and_of_what_is_added(current, qwen_pool):
    rollout, weights, version = current
    tokenizer = AutoTokenizer.from_pretrained(qwen_pool.model.path)
    play = Play(converse, __file__, 60.0, tokenizer)
    asked, settings = prompts(6), {"max_response_tokens": 60, "play": play}
    groups = sample(rollout, asked, version, 0.7, **settings)
    assert [[s.index for s in group.samples] for group in groups] == [list(range(G))] * 6
    model = qwen_pool.reference(weights)
    for group in groups:
        for one in group.samples:
            ids, mask = one.response_ids, one.loss_mask
            assert len(ids) == len(mask) == len(one.logprobs) == len(one.versions) <= 60
            assert set(one.versions) == {version} and one.length == sum(mask) and one.turns == 3
            expected = reference_logprobs(model, group.prompt.token_ids, ids, 0.7)
            own = torch.tensor(mask)
            found = torch.tensor(one.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found[own], expected[own], atol=1e-4, rtol=0)
            assert not found[~own].any()
            added = [
                tokenizer.decode([token for token, _ in run])
                for is_own, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
                if not is_own
            ]
            assert added[0] == "Q:" and re.fullmatch(r"\[\d\]", added[1])
            assert re.fullmatch("<user>(ok|x|7)", added[2])
            assert tokenizer.decode(ids, skip_special_tokens=True) == one.text.replace("<user>", "")
            is_cut = len(ids) == 60 and ids[-1] != tokenizer.eos_token_id
            assert one.finish_reason == ("length" if is_cut else "stop")
    ends = {s.finish_reason for group in groups for s in group.samples}
    stops = {s.text.partition("<user>")[2][:1] for group in groups for s in group.samples}
    assert len(ends) == 2 and {"o"} < stops  # all of it was there
    again = sample(rollout, asked, version, 0.7, **settings)
    assert [[s.response_ids for s in g.samples] for g in again] == [
        [s.response_ids for s in g.samples] for g in groups
    ]


def test_a_conversation_stays_with_the_server_that_has_it_in_its_cache(current, qwen_pool):
    async def talk(episode):
        while True:
            await episode.generate(max_tokens=2)

    play = Play(talk, __file__, 60.0, AutoTokenizer.from_pretrained(qwen_pool.model.path))
    with (
        FaultyProxy(qwen_pool.servers[0].url) as first,
        FaultyProxy(qwen_pool.servers[1].url) as second,
    ):
        rollout = qwen_pool.rollout([first.server, second.server])
        rollout.needs_sync = False
        sample(rollout, prompts(6), current[2], play=play)
        texts = [
            {tuple(body["input_ids"][0]) for path, body in proxy.seen if path == "/generate"}
            for proxy in (first, second)
        ]
    for here, there in (texts, texts[::-1]):
        assert here  # both were asked
        later = [text for text in here if text[:-2] in here | there]
        assert later and all(text[:-2] in here for text in later)


def test_samples_follow_the_distribution(current, qwen_pool):
    """2,000 first tokens against transformers' probabilities, by Pearson's chi-square."""
    rollout, weights, version = current
    prompt = prompts(1)[0]
    asked = [Prompt(f"c{i}", prompt.token_ids, "", "test", None) for i in range(20)]
    groups = sample(rollout, asked, version, samples_per_prompt=100, max_response_tokens=1)
    counts = Counter(s.response_ids[0] for group in groups for s in group.samples)
    logits = qwen_pool.reference(weights)(torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = 2000 * torch.softmax(logits.double(), 0)
    observed = torch.tensor([float(counts[i]) for i in range(len(expected))])
    statistic = float(((observed - expected) ** 2 / expected).sum().detach())
    # 99 degrees of freedom; beyond 190 lies less than one in ten million.
    assert statistic < 190


def test_prefill_logprobs_are_those_of_transformers(current, qwen_pool):
    rollout, weights, _ = current
    texts = [[5, 6, 7, 8, 9], [40], [90, 3, 17]]
    model = qwen_pool.reference(weights)
    for server in range(2):
        for text, logprobs in zip(texts, rollout.score_tokens(texts, server=server), strict=True):
            expected = reference_logprobs(model, tuple(text[:1]), text[1:])
            torch.testing.assert_close(
                torch.tensor(logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
            )


def test_greedy_sampling_takes_the_likeliest_token(current, qwen_pool):
    rollout, weights, version = current
    (group,) = sample(rollout, prompts(1), version, 0.0)
    responses = {s.response_ids for s in group.samples}
    assert len(responses) == 1
    context = list(group.prompt.token_ids)
    model = qwen_pool.reference(weights)
    for token in next(iter(responses)):
        assert token == int(model(torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)


def test_stop_tokens_end_a_response_and_belong_to_it(current):
    rollout, _, version = current
    everything = tuple(range(100))
    groups = sample(rollout, prompts(4), version, stop_token_ids=everything)
    assert all(s.length == 1 and s.finish_reason == "stop" for g in groups for s in g.samples)
    groups = sample(rollout, prompts(4), version, max_response_tokens=2)
    for s in (s for g in groups for s in g.samples):
        assert (s.finish_reason == "stop") == (s.response_ids[-1] == 1)


def test_each_group_is_announced_once_and_counted(current):
    rollout, _, version = current
    seen, before = [], len(rollout.servers[0].spans.done)
    groups = sample(rollout, prompts(5), version, on_group=seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, groups))
    stats = rollout.stats
    assert (stats.requests, stats.retries, stats.samples) == (5, 0, 5 * G)
    assert stats.response_tokens == sum(s.length for g in seen for s in g.samples)
    assert stats.prompt_tokens == sum(len(p.token_ids) for p in prompts(5))
    assert stats.read_tokens == G * stats.prompt_tokens
    assert len(stats.arrivals) == 5 and 0 < max(stats.arrivals) <= stats.seconds
    assert stats.tail_seconds == stats.seconds - stats.arrivals[-1]
    noted = rollout.servers[1].spans.done[before:]
    assert {span.path for span in noted} == {f"prompt {p.id}" for p in prompts(5)}
    assert {span.track for span in noted} == {"server 0", "server 1"}
    by_prompt = {f"prompt {g.prompt.id}": sum(s.length for s in g.samples) for g in groups}
    for span in noted:
        assert span.about == {"samples": G, "response_tokens": by_prompt[span.path]}
        assert 0 < span.seconds <= stats.seconds


def test_other_versions_are_refused(current, qwen_pool):
    _, _, version = current
    rollout = qwen_pool.rollout()
    wrong = version + 1
    assert_whole(sample(rollout, prompts(1), wrong, require_version=False), prompts(1), version)
    with pytest.raises(ServersLostError, match=rf"http://.*prompt p0.*\[{version}\].*{wrong}"):
        sample(rollout, prompts(1), wrong)
    assert rollout.serving == []


def test_what_the_server_would_choke_on_is_not_sent(current):
    rollout, _, version = current
    with pytest.raises(DataError, match="prompt odd holds token id 100"):
        sample(rollout, [*prompts(1), Prompt("odd", (5, 100), "", "t", None)], version)
    assert rollout.score_tokens([[5, 6]])


def test_a_refused_request_is_not_repeated(current):
    rollout, _, version = current
    with pytest.raises(ServerError, match=r"status 400.*512"):
        sample(rollout, [Prompt("long", (5,) * 600, "", "t", None)], version)
    assert rollout.stats.requests == 1


def test_only_who_has_the_key_is_answered(current, qwen_pool):
    (server, _), version = qwen_pool.servers, qwen_pool.version
    for key in (None, "another"):
        stranger = dataclasses.replace(server, api_key=key)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(stranger, "/flush_cache", {})
        with pytest.raises(ServerError, match=r"wants another API key.*MEGATRON_OPO_API_KEY"):
            sample(qwen_pool.rollout([stranger]), prompts(1), version)
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    shown = [" ".join(process.cmdline()) for process in processes]
    assert len(shown) > 3 and "sglang.launch_server" in shown[0]
    # They are forked, so that only one of them had to import SGLang.
    assert not any("multiprocessing" in text for text in shown)
    shown += [server.log.read_text(), repr(server)]
    assert "'api_key': '(hidden)'" in shown[-2]
    assert not [text for text in shown if API_KEY in text]


def test_metrics_are_shown_to_prometheus_which_has_no_key(qwen_pool):
    for server in qwen_pool.servers:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        names = {family.name for family in families}
        assert {"sglang:num_running_reqs", "sglang:token_usage"} <= names


def test_no_more_samples_in_flight_than_allowed(current, qwen_pool):
    _, _, version = current
    most, now, lock = [0], [0], threading.Lock()

    def count(path, _):
        if path != "/generate":
            return None
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])

        def done(content):
            with lock:
                now[0] -= 1
            return 200, content

        return done

    with FaultyProxy(qwen_pool.servers[0].url, plan=count) as proxy:
        rollout = qwen_pool.rollout([proxy.server], max_concurrent_requests=2 * G)
        rollout.needs_sync = False
        assert_whole(sample(rollout, prompts(9), version), prompts(9), version)
    assert 1 <= most[0] <= 2


def test_the_longest_prompts_go_first_each_before_its_group(current, qwen_pool):
    _, _, version = current
    lengths = [3, 40, 7, 90, 31]
    asked = [Prompt(f"q{n}", tuple(5 + i % 80 for i in range(n)), "", "t", None) for n in lengths]
    with FaultyProxy(qwen_pool.servers[0].url) as proxy:
        rollout = qwen_pool.rollout([proxy.server], max_concurrent_requests=G)
        rollout.needs_sync = False
        assert_whole(sample(rollout, asked, version), asked, version)
        sent = [body["input_ids"] for path, body in proxy.seen if path == "/generate"]
        assert sent == [
            *(list(asked[3].token_ids), [list(asked[3].token_ids)] * G),
            *(list(asked[1].token_ids), [list(asked[1].token_ids)] * G),
            *([list(asked[i].token_ids)] * G for i in (4, 2, 0)),
        ]

        # One after the other: the longest two are there first.
        groups = sample(rollout, asked, version, enough=2)
        assert [group.prompt.id for group in groups] == ["q40", "q90"]
        assert rollout.stats.given_up == 3
        assert proxy.seen[-1] == ("/abort_request", {"rid": "", "abort_all": True})
        # The shortest comes last, and is waited for.
        seen = []
        groups = sample(
            rollout, asked, version, enough=2, required=[asked[0]], on_group=seen.append
        )
        assert [group.prompt.id for group in groups] == ["q3", "q90"]
        assert len(seen) == 5 and rollout.stats.given_up == 3
        assert_whole(sample(rollout, asked, version), asked, version)


def change_answer(change):
    """A fault that edits each sample of the server's answer."""

    def fault(content: bytes) -> tuple[int, bytes]:
        answer = json.loads(content)
        for one in answer:
            change(one)
        return 200, json.dumps(answer).encode()

    return fault


def all_logprobs_nan(one):
    """As SGLang says it."""
    for pair in one["meta_info"]["output_token_logprobs"]:
        pair[0] = None


FAULTS = {
    "status 500": ((500, b"broken"), "status 500: broken"),
    "status 503": ((503, b""), "status 503"),
    "garbage": ((200, b"{{nonsense"), "not JSON.*nonsense"),
    "no text": ((200, b"\xff\xfe"), "."),
    "dropped connection": (DROP, "did not answer /generate"),
    "NaN logprobs": (change_answer(all_logprobs_nan), "logprob None"),
    "one sample too few": (
        lambda content: (200, json.dumps(json.loads(content)[1:]).encode()),
        f"{G - 1} samples came back, {G} were asked for",
    ),
    "aborted": (
        change_answer(lambda one: one["meta_info"].update(finish_reason={"type": "abort"})),
        "ended with 'abort'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_passing_fault_costs_a_retry_and_no_prompt(current, qwen_pool, name):
    _, _, version = current
    fault, _ = FAULTS[name]
    failed = set()

    def first_time(path, body):
        key = tuple(body.get("input_ids", [()])[0])
        if path != "/generate" or key in failed:
            return None
        failed.add(key)
        return fault

    with FaultyProxy(qwen_pool.servers[0].url, plan=first_time) as proxy:
        rollout = qwen_pool.rollout([proxy.server], retries=1)
        rollout.needs_sync = False
        assert_whole(sample(rollout, prompts(4), version), prompts(4), version)
    assert rollout.stats.retries == 4
    assert rollout.stats.requests == 8


@pytest.mark.parametrize("name", FAULTS)
def test_a_lasting_fault_is_named(current, qwen_pool, name):
    _, _, version = current
    fault, message = FAULTS[name]

    def plan(path, _):
        return fault if path == "/generate" else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=plan) as proxy:
        rollout = qwen_pool.rollout([proxy.server], retries=1)
        rollout.needs_sync = False
        with pytest.raises(ServerError, match=message) as caught:
            sample(rollout, prompts(2), version)
        assert proxy.url in str(caught.value)
        assert "in 2 attempts (rollout.retries 1)" in str(caught.value)


def test_another_server_takes_over(current, qwen_pool):
    _, _, version = current

    def broken(path, _):
        return (500, b"broken") if path == "/generate" else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=broken) as proxy:
        rollout = qwen_pool.rollout([proxy.server, qwen_pool.servers[1]], retries=1)
        rollout.needs_sync = False
        groups = sample(rollout, prompts(6), version)
    assert_whole(groups, prompts(6), version)
    assert {s.server for g in groups for s in g.samples} == {qwen_pool.servers[1].url}
    assert 1 <= rollout.stats.retries <= 6


def test_a_silent_server_is_given_up(current, qwen_pool):
    _, _, version = current
    rollout = qwen_pool.rollout([qwen_pool.servers[0]], request_timeout_s=0.001, retries=0)
    with pytest.raises(ServerError, match="did not answer /generate within"):
        sample(rollout, prompts(1), version, max_response_tokens=300)


def stale_answers(version):
    def stale(one):
        one["meta_info"]["weight_versions"][0]["version"] = version

    return lambda path, _: change_answer(stale) if path == "/generate" else None


@pytest.mark.parametrize("answered", ["1000007", "started-again"])
def test_nothing_that_other_weights_sampled_is_used(current, qwen_pool, answered):
    """Nor is that server asked again before it was given weights, whatever is still open there."""
    _, weights, version = current
    with FaultyProxy(qwen_pool.servers[0].url, plan=stale_answers(answered)) as proxy:
        said = []
        rollout = qwen_pool.rollout(
            [proxy.server, qwen_pool.servers[1]], retries=0, warn=said.append
        )
        rollout.needs_sync = False
        assert_whole(sample(rollout, prompts(8), version), prompts(8), version)
        assert rollout.serving == [qwen_pool.servers[1]]
        asked = proxy.asked("/generate")
        assert 1 <= asked <= rollout.stats.retries <= 4
        assert_whole(sample(rollout, prompts(8), version), prompts(8), version)
        assert proxy.asked("/generate") == asked
        (warning,) = said
        assert proxy.url in warning and answered in warning
        proxy.plan = lambda *_: None
        rollout.sync(iter(weights.items()), version)
        assert_sampled_from(qwen_pool, rollout, weights, version)
        assert len(rollout.serving) == 2


def test_a_step_stops_when_all_servers_hold_other_weights(current, qwen_pool):
    _, _, version = current
    with FaultyProxy(qwen_pool.servers[0].url, plan=stale_answers(str(version - 1))) as proxy:
        rollout = qwen_pool.rollout([proxy.server])
        rollout.needs_sync = False
        with pytest.raises(ServersLostError, match=rf"prompt p\d.*\[{version - 1}\].*{version}"):
            sample(rollout, prompts(3), version)
        with pytest.raises(ServersLostError, match="no server holds the current weights"):
            sample(rollout, prompts(3), version)


def test_a_server_whose_answers_are_never_of_use_is_left_out(current, qwen_pool):
    _, _, version = current

    def broken(path, _):
        return change_answer(all_logprobs_nan) if path == "/generate" else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=broken) as proxy:
        said = []
        rollout = qwen_pool.rollout([proxy.server, qwen_pool.servers[1]], warn=said.append)
        rollout.needs_sync = False
        assert_whole(sample(rollout, prompts(40), version), prompts(40), version)
        assert 8 <= proxy.asked("/generate") < 40
    assert rollout.serving == [qwen_pool.servers[1]]
    assert "gave 8 unusable answers in a row, the last: token 0 of sample 0" in said[0]


def test_a_server_that_drops_out_of_sight_is_left_out_and_comes_back(current, qwen_pool):
    """What it was asked does not count as a failure of the prompt, which may have none here."""
    _, weights, version = current
    gone = threading.Event()

    def vanish(path, _):
        gone.set() if path == "/generate" else None
        return DROP if gone.is_set() else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=vanish) as proxy:
        rollout = qwen_pool.rollout(
            [proxy.server, qwen_pool.servers[1]],
            retries=0,
            health_every_s=0.5,
            health_timeout_s=3.0,
        )
        rollout.needs_sync = False
        assert_whole(sample(rollout, prompts(6), version), prompts(6), version)
        assert rollout.serving == [qwen_pool.servers[1]]
        rollout.sync(iter(weights.items()), version)
        assert rollout.serving == [qwen_pool.servers[1]]
        proxy.plan = lambda *_: None
        rollout.sync(iter(weights.items()), version)
        assert_sampled_from(qwen_pool, rollout, weights, version)
        assert len(rollout.serving) == 2


def test_after_an_error_nothing_keeps_running(current, qwen_pool):
    """A failed step aborts what it asked for, so that the server is free for whoever comes next."""
    _, _, version = current
    victim = list(prompts(1)[0].token_ids)

    def plan(path, body):
        return (400, b"no") if victim in body.get("input_ids", []) else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=plan) as proxy:
        rollout = qwen_pool.rollout([proxy.server])
        rollout.needs_sync = False
        with pytest.raises(ServerError, match="status 400: no"):
            sample(rollout, prompts(3), version, max_response_tokens=400)
        assert ("/abort_request", {"rid": "", "abort_all": True}) in proxy.seen


def test_servers_given_by_url_are_not_trusted_before_a_sync(qwen_pool):
    with FaultyProxy(qwen_pool.servers[0].url) as proxy:
        given = qwen_pool.rollout([proxy.server])
        assert given.needs_sync
        with pytest.raises(OnPolicyError, match="never synced"):
            sample(given, prompts(1), 0)
        with pytest.raises(OnPolicyError, match="never synced"):
            given.score_tokens([[5, 6]])


def test_another_pool_with_other_weights_answers_otherwise(llama_pool):
    """A server over two ranks: what it holds is sampled without a sync, by the version that it
    reports, and then what it is sent."""
    rollout = llama_pool.rollout()
    assert not rollout.needs_sync
    (held,) = map(int, reported_versions(llama_pool))
    assert_whole(sample(rollout, prompts(3), held), prompts(3), held)
    weights = perturbed(llama_pool.weights(), 5)
    version = llama_pool.next_version()
    rollout.sync(iter(weights.items()), version)
    model = llama_pool.reference(weights)
    for group in sample(rollout, prompts(3), version):
        for one in group.samples:
            expected = reference_logprobs(model, group.prompt.token_ids, one.response_ids)
            torch.testing.assert_close(
                torch.tensor(one.logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
            )
