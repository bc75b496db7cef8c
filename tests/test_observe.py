import json
import math
import os
import pty
import re
import resource
import threading
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.errors import LogError
from megatron_opo.observe.console import Console
from megatron_opo.observe.files import append_text, read_json_lines, read_metrics
from megatron_opo.observe.metrics import (
    eval_metrics,
    rollout_metrics,
)
from megatron_opo.observe.run_log import RunLog
from megatron_opo.observe.samples import (
    choose_groups,
    list_samples,
    read_samples,
    sample_record,
    token_chars,
)
from megatron_opo.observe.text import duration, header_line, step_line
from megatron_opo.spans import Spans

ESCAPE = "\x1b"


def make_group(name, lengths, rewards, *, prompt_length=2, finish=None):
    finish = finish or ["stop"] * len(lengths)
    samples = [
        Sample(
            group_id=name,
            index=i,
            response_ids=(7,) * length,
            logprobs=(-0.25,) * length,
            versions=(0,) * length,
            finish_reason=finish[i],
            text=f"{name} says {i}",
            reward=reward,
            reward_error="no number found" if reward is None else None,
        )
        for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    prompt = Prompt(name, (3,) * prompt_length, f"question {name}", "arith", "42")
    return Group(prompt, tuple(samples))


def open_log(path, **options):
    options = {"recipe_text": "name: r\n", "versions": {"torch": "2"}, "total_steps": 5} | options
    return RunLog(path, quiet=True, **options)


# --- metrics


def test_rollout_metrics_are_the_hand_computed_fractions():
    finish = ["stop", "length", "stop"]
    groups = [
        make_group("a", [1, 3], [1.0, 0.0], prompt_length=2),
        make_group("b", [2, 5, 2], [0.5, None, 0.5], prompt_length=5, finish=finish),
    ]
    batch = pack(groups)
    # Baselines: (1 * 1 + 3 * 0) / 4 = 1/4 and 1/2; advantages 3/4, -1/4, 0, 0.
    for sequence, advantage in enumerate([0.75, -0.25, 0.0, 0.0]):
        start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
        batch.advantages[start:end] = advantage
    batch.advantages[~batch.loss_mask] = 99.0

    baselines = torch.tensor([0.25, 0.25, 0.5, 0.5], dtype=torch.float64)
    assert rollout_metrics(groups, batch, baselines) == {
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        # Over 1, 0, 1/2, 1/2: variance (1/4 + 1/4) / 4.
        "critic/rewards/std": pytest.approx(math.sqrt(1 / 8), rel=1e-15),
        # Over tokens: (1 * 3/4 - 3 * 1/4 + 4 * 0) / 8.
        "critic/advantages/mean": 0.0,
        "critic/advantages/max": 0.75,
        "critic/advantages/min": -0.25,
        "response_length/mean": 13 / 5,
        "response_length/max": 5.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 1 / 5,
        "prompt_length/mean": 3.5,
        "prompt_length/max": 5.0,
        "prompt_length/min": 2.0,
        "advantages/baseline_mean": 3 / 8,
        "advantages/baseline_std": 1 / 8,
        "rollout/groups_all_equal": 1 / 2,
        "rollout/samples": 5.0,
        "rollout/tokens": 13.0,
        "rollout/unscorable": 1.0,
        "rollout/unscorable_share": 1 / 5,
        "rollout/truncated": 1.0,
    }


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(-4, 4)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_baselines_are_the_mean_and_deviation_over_groups_of_the_mean_over_tokens(members):
    groups = [
        make_group(f"g{i}", [n for n, _ in group], [0.0] * len(group))
        for i, group in enumerate(members)
    ]
    # A response without tokens has no baseline.
    values = [b / 4 if n else math.nan for group in members for n, b in group]
    metrics = rollout_metrics(groups, pack(groups), torch.tensor(values, dtype=torch.float64))
    expected = []
    for group in members:
        total = sum(n for n, _ in group)
        if total:
            expected.append(sum(n * Fraction(b, 4) for n, b in group) / total)
    if not expected:
        assert "advantages/baseline_mean" not in metrics
        return
    mean = sum(expected) / len(expected)
    variance = sum((b - mean) ** 2 for b in expected) / len(expected)
    assert metrics["advantages/baseline_mean"] == pytest.approx(float(mean), abs=1e-12)
    assert metrics["advantages/baseline_std"] == pytest.approx(math.sqrt(variance), abs=1e-7)


def test_responses_without_tokens_leave_out_what_they_cannot_define():
    groups = [make_group("a", [0, 0], [1.0, 0.0])]
    metrics = rollout_metrics(groups, pack(groups), torch.full((2,), math.nan))
    assert metrics["response_length/mean"] == 0
    assert "critic/advantages/mean" not in metrics
    assert "advantages/baseline_mean" not in metrics


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([None, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=k, max_size=k),
            min_size=1,
            max_size=4,
        )
    )
)
def test_pass_at_j_is_the_share_of_all_draws_of_j_with_a_correct_one(rewards):
    k = len(rewards[0])
    metrics = eval_metrics([make_group(f"g{i}", [1] * k, r) for i, r in enumerate(rewards)])
    for j in {j for j in (1, 2, 4, k) if j <= k}:
        shares = []
        for group in rewards:
            draws = list(combinations(group, j))
            right = sum(any(r is not None and r >= 1 for r in draw) for draw in draws)
            shares.append(Fraction(right, len(draws)))
        expected = float(sum(shares) / len(shares))
        assert metrics[f"eval/pass@{j}"] == pytest.approx(expected, abs=1e-12)
    values = [r or 0.0 for group in rewards for r in group]
    assert metrics[f"eval/avg@{k}"] == pytest.approx(sum(values) / len(values), abs=1e-12)
    assert metrics["eval/unscorable"] == sum(r is None for group in rewards for r in group)
    assert {name for name in metrics if "pass@" in name} == {
        f"eval/pass@{j}" for j in {1, 2, 4, k} if j <= k
    }


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        eval_metrics([])
    with pytest.raises(ValueError, match="at least one sample"):
        eval_metrics([make_group("a", [], [])])


# --- samples


def test_kept_groups_are_whole_and_start_with_the_most_mixed_worst_and_best():
    groups = [
        make_group("fair", [1, 1], [0.5, 0.5]),
        make_group("best", [1, 1], [1.0, 1.0]),
        make_group("mixed", [1, 1], [0.0, 1.0]),
        make_group("worst", [1, 1], [0.0, 0.0]),
    ]
    assert choose_groups(groups, 6, "train") == [2, 3, 1]
    assert choose_groups(groups, 5, "train") == [2, 3]
    assert choose_groups(groups, 5, "eval") == [0, 1]
    assert choose_groups(groups, 1, "train") == [2], "one group stays even above the limit"
    assert choose_groups(groups, 0, "train") == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=5), max_size=6),
    st.integers(1, 20),
    st.sampled_from(["train", "eval"]),
)
def test_kept_groups_fit_the_limit(rewards, limit, kind):
    groups = [make_group(f"g{i}", [1] * len(r), r) for i, r in enumerate(rewards)]
    chosen = choose_groups(groups, limit, kind)
    assert len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(groups)
    assert len(chosen) <= 1 or sum(len(rewards[i]) for i in chosen) <= limit


def test_samples_file_tells_all_about_each_response(tmp_path):
    group = make_group("a", [2, 4], [1.0, None], finish=["stop", "length"])
    with open_log(tmp_path, samples_per_step=2) as log:
        log.samples(17, [group], [[0.5, math.nan]], baselines=[[0.25, math.nan]])
        log.samples(20, [group], kind="eval")
    lines = (tmp_path / "samples" / "step_000017.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "step": 17, "group_id": "a", "index": 0, "prompt": "question a",
            "response": "a says 0", "ground_truth": "42", "reward": 1.0, "advantage": 0.5,
            "baseline": 0.25, "length": 2, "finish_reason": "stop", "logprob": -0.5,
            "reward_error": None,
        },
        {
            "step": 17, "group_id": "a", "index": 1, "prompt": "question a",
            "response": "a says 1", "ground_truth": "42", "reward": None, "advantage": None,
            "baseline": None, "length": 4, "finish_reason": "length", "logprob": -1.0,
            "reward_error": "no number found",
        },
    ]  # fmt: skip
    (evaluated,) = read_samples(tmp_path / "samples" / "eval_step_000020.jsonl")
    assert [record["advantage"] for record in evaluated] == [None, None]


def of_bytes(text, **fields):
    """A sample whose tokens are the bytes of its text, and one that is special."""
    ids = (*text.encode(), 999)
    logprobs = tuple(-0.123456 * i for i in range(len(ids)))
    return Sample("g", 0, ids, logprobs, (0,) * len(ids), "stop", text, **fields)


def decode_bytes(ids):
    return bytes(i for i in ids if i < 256).decode(errors="replace")


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_a_character_belongs_to_the_token_that_completes_it(text):
    expected = [n for c in text for n in (*[0] * (len(c.encode()) - 1), 1)]
    assert token_chars(of_bytes(text), decode_bytes) == [*expected, 0]


def test_tokens_that_do_not_make_the_text_are_left_out():
    sample = replace(of_bytes("as it was"), text="as it is")
    record = sample_record(1, Group(make_group("g", [1], [1.0]).prompt, (sample,)), sample, 0.0,
                           decode=decode_bytes)  # fmt: skip
    assert "token_chars" not in record and "token_logprobs" not in record


WORDS = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(WORDS, min_size=1, max_size=6), st.booleans())
def test_what_was_added_keeps_the_tokens_of_the_rest_where_they_are(turns, policy_begins):
    """Also where it has special tokens, which stand in it but not in what they decode to."""
    ids, mask, added, expected, text = [], [], [], [], ""
    for i, words in enumerate(turns):
        own = (i % 2 == 0) == policy_begins
        of_turn = [*words.encode(), 999] if own else [999, *words.encode()]
        if own:
            expected += [n for c in words for n in (*[0] * (len(c.encode()) - 1), 1)] + [0]
        else:
            words = f"<|tool|>{words}"
            added.append((len(text), len(text) + len(words)))
            expected += [len(words)] + [0] * (len(of_turn) - 1)
        ids += of_turn
        mask += [own] * len(of_turn)
        text += words
    numbers = (0.0,) * len(ids)
    sample = Sample("g", 0, tuple(ids), numbers, (0,) * len(ids), "stop", text,
                    loss_mask=tuple(mask), added=tuple(added))  # fmt: skip
    group = Group(make_group("g", [1], [1.0]).prompt, (sample,))
    record = sample_record(1, group, sample, 0.0, decode=decode_bytes)
    assert record["token_chars"] == expected
    assert record.get("added", []) == [list(span) for span in added]


def test_each_token_is_kept_with_what_is_known_of_it(tmp_path):
    sample = of_bytes("abc", loss_mask=(True, False, True, True), reward=1.0)
    group = Group(make_group("g", [1], [1.0]).prompt, (sample,))
    entropies = {"token_entropies": [1.23456, 0.0, math.nan, 0.5]}
    with open_log(tmp_path, decode=decode_bytes) as log:
        log.samples(1, [group], token_values=lambda _: entropies)
    ((record,),) = read_samples(tmp_path / "samples" / "step_000001.jsonl")
    assert record["token_chars"] == [1, 1, 1, 0]
    assert record["token_logprobs"] == [0.0, None, -0.247, -0.37]
    assert record["token_entropies"] == [1.23, None, None, 0.5]


# --- the log


def scalars(path, tag):
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def write_five_steps(path):
    group = make_group("a", [1, 1], [0.0, 1.0])
    with open_log(path) as log:
        for step in range(6):
            if step:
                log.samples(step, [group])
                log.step(step, {"critic/rewards/mean": step / 8})
            if step % 2 == 0:
                log.samples(step, [group], kind="eval")
                log.eval(step, {"eval/avg@1": step / 4})


def test_a_resumed_run_has_every_step_once(tmp_path):
    write_five_steps(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "kind": "tra')  # killed while it wrote
    before = read_metrics(tmp_path)
    with open_log(tmp_path, first_step=2) as log:
        log.step(3, {"critic/rewards/mean": 0.875})
    records = read_metrics(tmp_path)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3),
    ]  # fmt: skip
    assert records[:4] == before[:4]
    assert records[4]["critic/rewards/mean"] == 0.875
    assert records[4]["elapsed_s"] >= records[3]["elapsed_s"]
    assert scalars(tmp_path, "critic/rewards/mean") == [(1, 0.125), (2, 0.25), (3, 0.875)]
    assert scalars(tmp_path, "eval/avg@1") == [(0, 0.0), (2, 0.5)]
    assert [step for step, _ in list_samples(tmp_path, "train")] == [1, 2]
    assert [step for step, _ in list_samples(tmp_path, "eval")] == [0, 2]


def test_a_clock_that_was_set_back_puts_no_old_curve_over_the_new_one(tmp_path):
    write_five_steps(tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    parts = events.name.split(".")
    parts[3] = str(int(parts[3]) + 3600)
    events.rename(events.with_name(".".join(parts)))
    for first in (2, 1):
        with open_log(tmp_path, first_step=first) as log:
            log.step(first + 1, {"critic/rewards/mean": 0.875})
    assert scalars(tmp_path, "critic/rewards/mean") == [(1, 0.125), (2, 0.875)]


def test_a_fresh_run_in_an_old_directory_starts_from_nothing(tmp_path):
    write_five_steps(tmp_path)
    with open_log(tmp_path) as log:
        log.eval(0, {"eval/avg@1": 1.0})
    assert [(r["kind"], r["step"]) for r in read_metrics(tmp_path)] == [("eval", 0)]
    assert scalars(tmp_path, "eval/avg@1") == [(0, 1.0)]
    assert list_samples(tmp_path, "train") == list_samples(tmp_path, "eval") == []


def test_recipe_and_versions_are_stored(tmp_path):
    open_log(tmp_path / "new" / "run").close()
    assert (tmp_path / "new" / "run" / "recipe.yaml").read_text() == "name: r\n"
    assert json.loads((tmp_path / "new" / "run" / "versions.json").read_text()) == {"torch": "2"}


class Clock:
    """By hand, so that seconds can be exact."""

    now = 100.0

    def __call__(self):
        return self.now

    def spend(self, log, phase, seconds):
        with log.phase(phase):
            self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_every_second_of_a_step_is_of_a_phase_and_steps_follow_without_a_gap(tmp_path, clock):
    spans = Spans(clock)
    spans.add_earlier("imports", clock.now - 8)
    with open_log(tmp_path, spans=spans) as log:
        clock.spend(log, "servers", 30)
        clock.spend(log, "sync", 4)
        clock.spend(log, "eval", 7)
        log.eval(0, {"eval/avg@1": 0.0})
        for step in (1, 2):
            with log.phase("generate"):
                for _ in range(2):
                    clock.now += 2
                    log.first_sample()
                clock.now += 1
            with log.phase("update"):
                clock.spend(log, "optimizer", 2)
                clock.now += 0.5
            clock.now += 1  # no phase
            clock.spend(log, "update", 2.5)
            clock.spend(log, "sync", 1)
            log.step(step, {}, tokens=60 * step)
            clock.spend(log, "checkpoint", 9)
            clock.spend(log, "eval", 3)
            log.eval(step, {"eval/avg@1": 0.0})
    evaluated, first, between, second, _ = read_metrics(tmp_path)
    assert timings(evaluated) == {"eval": 7}
    assert timings(between) == {"eval": 3}
    inside = {
        "generate": 5, "update": 5, "update/optimizer": 2, "update/unaccounted": 3, "sync": 1,
        "unaccounted": 1,
    }  # fmt: skip
    told = "first sample after 51 s: imports 8, servers 30, sync 4, eval 7, generate 2\n"
    assert (tmp_path / "run.log").read_text().count("first sample") == 1
    assert told in (tmp_path / "run.log").read_text()
    # Writing takes no time on this clock.
    assert timings(first) == inside | {"step": 12}
    assert timings(second) == inside | {"checkpoint": 9, "eval": 3, "log": 0, "step": 24}
    starts = {"imports": 8, "servers": 30, "sync": 4, "eval": 7, "unaccounted": 0}
    starts["first_sample"] = 51
    assert timings(first, "start_s/") == starts and not timings(second, "start_s/")
    assert [r["elapsed_s"] for r in (evaluated, first, second)] == [41, 53, 77]
    assert first["perf/tokens_per_second"] == second["perf/tokens_per_second"] == 5


def timings(record, prefix="timing_s/"):
    found = {name: value for name, value in record.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in found.items()}


def test_time_left_counts_steps_and_what_lies_between_them(tmp_path, clock, capsys):
    options = {"recipe_text": "", "versions": {}, "spans": Spans(clock)}
    with RunLog(tmp_path, total_steps=4, **options) as log:
        clock.spend(log, "start", 1000)
        for step in (1, 2, 3, 4):
            clock.spend(log, "generate", 20)
            log.step(step, {})
            clock.spend(log, "checkpoint", 4)
    # 20 s; then (20 + 4 + 20) / 2, and so on, times the steps that are left.
    lefts = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lefts == [duration(60), duration(44), duration(68 / 3), "0s"]


def test_what_is_not_finite_is_null_on_disk_and_named_in_the_terminal(tmp_path, capsys):
    with RunLog(tmp_path, recipe_text="", versions={}, total_steps=1) as log:
        log.step(1, {"actor/entropy": math.nan, "on_policy/logprob_gap_max": math.inf})
    (record,) = read_metrics(tmp_path)
    assert record["actor/entropy"] is None
    assert record["on_policy/logprob_gap_max"] is None
    assert " nan " in capsys.readouterr().out


def test_an_error_ends_the_log_and_is_written_to_it(tmp_path):
    with pytest.raises(RuntimeError, match="lost a server"), open_log(tmp_path) as log:
        log.step(1, {"a": 1.0})
        raise RuntimeError("lost a server")
    assert "stopped by RuntimeError: lost a server" in (tmp_path / "run.log").read_text()
    assert scalars(tmp_path, "a") == [(1, 1.0)]


def test_a_full_disk_is_named_and_earlier_lines_stay(tmp_path):
    log = open_log(tmp_path)
    log.step(1, {"a": 1.0})
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept.jsonl"
    path.rename(kept)
    path.symlink_to("/dev/full")
    with pytest.raises(LogError, match=r"metrics\.jsonl: .*disk is full.*earlier is intact"):
        log.step(2, {"a": 2.0})
    log.close()
    assert [record["step"] for record in read_json_lines(kept)] == [1]


def test_a_line_that_does_not_fit_leaves_no_half_behind(tmp_path):
    path = tmp_path / "log"
    append_text(path, "x" * 79 + "\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(LogError, match="log: cannot be written"):
            append_text(path, "y" * 79 + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "x" * 79 + "\n"


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=r"file/run: cannot be written: .*run_dir"):
        open_log(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"metrics\.jsonl, line 2: not valid JSON"),
        ("[1]", r"metrics\.jsonl, line 2: must be a JSON object"),
        ('{"step": "two", "kind": "train"}', r"metrics\.jsonl: a record has step 'two'"),
        ('{"step": 2}', r"metrics\.jsonl: a record has step 2 and kind None"),
    ],
)
def test_a_broken_metrics_file_is_refused_with_its_line(tmp_path, line, message):
    good = '{"step": 1, "kind": "train"}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(LogError, match=message):
        open_log(tmp_path, first_step=1)


# --- the terminal


def drive(console):
    console.line("model tiny")
    for step in (1, 2, 3):
        console.start_phase("generate")
        console.advance(1, 4, "1 of 4 [samples]")
        console.end_phase()
        console.step(step, {"critic/rewards/mean": step / 4}, 60.0)
    console.warn("careful")
    console.close()


def test_plain_output_has_one_line_a_step_and_no_control_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drive(Console(3))
    out = capsys.readouterr().out
    assert ESCAPE not in out and "\r" not in out
    assert out.splitlines() == [
        "model tiny",
        header_line(),
        *(step_line(step, {"critic/rewards/mean": step / 4}, 60.0) for step in (1, 2, 3)),
        "warning: careful",
    ]


def test_quiet_output_is_warnings_only(capsys):
    drive(Console(3, quiet=True))
    assert capsys.readouterr().out == "warning: careful\n"


def read_chunk(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # what Linux answers once the other end is closed
        return b""


def test_a_terminal_shows_the_phase_and_keeps_the_step_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    leader, follower = pty.openpty()
    chunks = []
    # A terminal's buffer is small: somebody must read while the console writes.
    reader = threading.Thread(target=lambda: chunks.extend(iter(lambda: read_chunk(leader), b"")))
    reader.start()
    with os.fdopen(follower, "w") as stream:
        drive(Console(3, stream=stream))
    reader.join()
    os.close(leader)
    out = b"".join(chunks).decode()
    assert "generate" in out and "of 3 steps" in out
    erased = out.replace("\x1b[2K", "\n")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", erased).replace("\r", "").splitlines()
    for step in (1, 2, 3):
        assert step_line(step, {"critic/rewards/mean": step / 4}, 60.0) in lines
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor comes back"


def test_a_step_line_fits_a_terminal_and_stands_under_its_header():
    metrics = {
        "critic/rewards/mean": -123.456, "response_length/mean": 12345.6,
        "actor/entropy": 1.5e-7, "on_policy/logprob_gap_max": 2.5e-5,
        "timing_s/generate": 3599.0, "timing_s/reward": 0.04, "timing_s/update": 7322.0,
        "timing_s/sync": 86399.0,
    }  # fmt: skip
    line = step_line(99999, metrics, 9e5)
    assert len(line) == len(header_line()) <= 80
    shown = "99999 -123 12346 1.5e-07 2.5e-05 59m59s 40ms 2h02m 23h59m 10d10h"
    assert line.split() == shown.split()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"), (0.0001, "<1ms"), (0.04, "40ms"), (0.0994, "99ms"),
        (0.0996, "0.1s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"),
        (3599.6, "1h00m"), (7325, "2h02m"), (86399, "23h59m"), (90000, "1d01h"), (math.inf, "?"),
    ],
)  # fmt: skip
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text
