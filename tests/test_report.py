import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.errors import LogError
from megatron_opo.observe.charts import (
    MOST_POINTS,
    Line,
    legend,
    line_chart,
    smoothed,
    stacked_chart,
    tick,
    ticks,
)
from megatron_opo.observe.report import write_report
from megatron_opo.observe.report_samples import browser_data, member_of

VOID = {"meta", "line", "rect", "circle", "polyline", "br", "img", "link", "input"}
HOSTILE = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>&amp; \x1b[31m\x00'


class Page(HTMLParser):
    """Checks that tags balance, and collects what the tests ask about."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.attributes = [], [], {}, []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if dict(attributes).get("id"):
            self.ids[dict(attributes)["id"]] = tag
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


def train_record(step, **metrics):
    record = {"step": step, "kind": "train", "time": "2026-01-02T03:04:05+00:00", "elapsed_s": step}
    return record | metrics


def eval_record(step, **metrics):
    return {"step": step, "kind": "eval", "elapsed_s": step} | metrics


def sample(step, index=0, **fields):
    record = {
        "step": step, "group_id": "g", "index": index, "prompt": "1+1=", "response": f"r{index}",
        "ground_truth": "2", "reward": 0.0, "advantage": 0.0, "length": 3,
        "finish_reason": "stop", "logprob": -1.0, "reward_error": None,
    }  # fmt: skip
    return record | fields


def write_lines(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def full_run(path, steps=12):
    records = [eval_record(0, **{"eval/avg@4": 0.25, "eval/pass@4": 0.5, "eval/prompts": 8.0})]
    for step in range(1, steps + 1):
        metrics = {
            "critic/rewards/mean": step / 16, "response_length/mean": 30.0 - step,
            "response_length/clip_ratio": 0.0, "rollout/groups_all_equal": 0.5,
            "actor/entropy": 1 / step, "actor/grad_norm": 0.5, "advantages/baseline_mean": 0.3,
            "on_policy/logprob_gap_max": 10.0**-step, "on_policy/logprob_gap_mean": 0.0,
            "timing_s/generate": 4.0, "timing_s/reward": 0.5, "timing_s/update": 2.0,
            "timing_s/sync": 1.0, "timing_s/checkpoint": 0.3, "timing_s/log": 0.1,
            "timing_s/update/optimizer": 1.5, "timing_s/update/unaccounted": 0.5,
            "timing_s/unaccounted": 0.2, "timing_s/step": 8.1, "rollout/tokens": 1000.0,
            "rollout/samples": 10.0,
        }  # fmt: skip
        records.append(train_record(step, **metrics))
    last = {"eval/avg@4": 0.75, "eval/pass@4": 1.0, "eval/prompts": 8.0}
    records.append(eval_record(steps, **last))
    write_lines(path / "metrics.jsonl", records)
    for step in (1, steps):
        group = [sample(step, 0, reward=1.0, advantage=0.5), sample(step, 1, advantage=-0.5)]
        write_lines(path / "samples" / f"step_{step:06d}.jsonl", group)
    for step, reward in ((0, 0.0), (steps, 1.0)):
        held_out = [sample(step, response=f"held out at {step}", reward=reward, advantage=None)]
        write_lines(path / "samples" / f"eval_step_{step:06d}.jsonl", held_out)
    (path / "recipe.yaml").write_text(
        f"name: demo\nmodel: {{path: models/tiny}}\ntrain: {{steps: {steps}}}\n"
        "algorithm: {estimator: opo, max_logprob_gap: 0.5}\n"
    )
    (path / "versions.json").write_text('{"torch": "2.13.0"}')
    return path


def report(path):
    text = write_report(path).read_text()
    return text, Page(text)


def found_in(page):
    """What the browser of samples looks through: (kind, step) to groups."""
    found: dict[tuple[str, int], list] = {}
    for group in json.loads(page.texts["script"][0])["groups"]:
        found.setdefault((group["kind"], group["step"]), []).append(group)
    return found


def test_only_the_scripts_of_the_page_itself_may_run(tmp_path):
    _, page = report(full_run(tmp_path))
    (policy,) = [v for _, v in page.attributes if v and v.startswith("default-src")]
    hashes = [hashlib.sha256(script.encode()).digest() for script in page.texts["script"][1:]]
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    assert policy.startswith(f"default-src 'none'; script-src {allowed}; ")
    assert "connect-src" not in policy, "this page asks nobody"


def test_a_finished_run_has_every_section_and_headline(tmp_path):
    text, page = report(full_run(tmp_path))
    sections = {"headline", "curves", "samples", "details", "metrics", "recipe", "versions"}
    assert sections <= set(page.ids)
    assert page.texts["h1"] == ["demo"]
    titles = ["Reward", "Response length", "Entropy", "Logprob gap", "Gradient norm", "Baseline",
              "Shares", "Time of a step", "Step 1", "Step 12"]  # fmt: skip
    assert page.texts["h3"] == titles
    assert page.tags.count("svg") == 10  # the two wide ones also come in a narrow drawing
    assert "finished: 12 of 12 steps" in text
    # Mean of steps 1, 2 and of 11, 12, in sixteenths.
    for shown in ("0.0938 \u2192 0.72", "0.25 \u2192 0.75", "0.50 \u2192 1.00", "8.1s a step"):
        assert shown in text
    # What is stacked adds up to the step.
    stack = ["generate: 4 s", "reward: 0.5 s", "update: 2 s", "sync: 1 s", "other phases: 0.4 s",
             "unaccounted: 0.2 s"]  # fmt: skip
    assert "\n".join(["step 12", *stack]) in text
    assert "12k" in text and "in 120 responses" in text
    assert "held out at 0" in text and "held out at 12" in text
    assert "stops at 0.5" in text


@pytest.mark.parametrize(("kind", "stops"), [("none", True), ("truncate", False)])
def test_the_bound_that_a_recipe_leaves_to_the_default_is_drawn(kind, stops, tmp_path):
    path = full_run(tmp_path)
    (path / "recipe.yaml").write_text(
        f"name: demo\nalgorithm: {{max_logprob_gap: null, correction: {{kind: {kind}}}}}\n"
    )
    text, _ = report(path)
    assert ("stops at 0.5" in text) == stops


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    text, page = report(full_run(tmp_path))
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert (
        "http:" not in text
        and "https:" not in text
        and "url(" not in text
        and "@import" not in text
    )
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_all_text_of_models_and_data_is_shown_and_never_run(tmp_path):
    full_run(tmp_path)
    hostile = sample(
        12, prompt=HOSTILE, response=HOSTILE, ground_truth={"x": HOSTILE}, reward_error=HOSTILE,
        reward=1.0,
    )  # fmt: skip
    for name in ("step_000012", "eval_step_000000", "eval_step_000012"):
        write_lines(tmp_path / "samples" / f"{name}.jsonl", [hostile])
    (tmp_path / "recipe.yaml").write_text(json.dumps({"name": HOSTILE, "model": {"path": HOSTILE}}))
    (tmp_path / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    write_lines(
        tmp_path / "metrics.jsonl",
        [train_record(1, **{HOSTILE: 1.0}), eval_record(1, **{"eval/avg@1": 0.5})],
    )
    text, page = report(tmp_path)
    assert "img" not in page.tags
    assert page.tags.count("script") == 3, "the data of the browser, its code, and that of charts"
    assert set(found_in(page)) == {("train", 1), ("train", 12), ("eval", 0), ("eval", 12)}
    (group,) = found_in(page)["train", 12]
    assert group["truth"] == json.dumps({"x": HOSTILE}) and "<" not in page.texts["script"][0]
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert group["prompt"] == group["members"][0]["text"] == group["members"][0]["error"]
    visible = HOSTILE.replace("\x1b", "\u241b").replace("\x00", "\u2400")
    assert page.texts["pre"].count(visible) >= 4, "shown as it is, prompt and response"
    assert group["prompt"] == visible
    assert "\x1b" not in text and "\x00" not in text


def test_half_a_character_and_a_huge_response_are_shown(tmp_path):
    full_run(tmp_path)
    records = [
        sample(12, 0, response="\ud83d lost", reward=1.0),
        sample(12, 1, response="y" * 9000),
    ]
    write_lines(tmp_path / "samples" / "step_000012.jsonl", records)
    text, page = report(tmp_path)
    assert "? lost" in text
    cut = "y" * 4000 + "\n[... 3,000 characters left out ...]\n" + "y" * 2000
    assert cut in text and "y" * 4001 not in text
    assert found_in(page)["train", 12][0]["members"][1]["text"] == cut


def test_tokens_carry_levels_of_their_values(tmp_path):
    full_run(tmp_path)
    token = {"token_chars": [1, 2, 0], "token_logprobs": [0.0, -1.5, None],
             "token_gaps": [1e-4, 0.0, 3e-4]}  # fmt: skip
    records = [
        sample(12, 0, response="a\U0001f600b", **token),
        sample(12, 1, response="other text", **token),
    ]
    write_lines(tmp_path / "samples" / "step_000012.jsonl", records)
    _, page = report(tmp_path)
    data = json.loads(page.texts["script"][0])
    assert data["halves"] == {"logprob": 1.5, "entropy": 1.0, "gap": 1e-4}
    first, second = found_in(page)["train", 12][0]["members"]
    assert "chars" not in second, "they do not make its text"
    assert first["chars"] == [1, 2, 0] and "entropy" not in first
    # At its half a value has half of the 64 levels, at three times that three quarters.
    levels = data["levels"]
    assert first["logprob"] == levels[0] + levels[32] + "."
    assert first["gap"] == levels[32] + levels[0] + levels[48]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=40))
def test_pieces_make_the_shown_text_also_where_it_is_cut(sizes):
    text = "".join(chr(97 + i % 26) * size for i, size in enumerate(sizes))
    member = member_of(
        {"response": text, "token_chars": sizes, "token_logprobs": [-0.5] * len(sizes)}
    )
    assert sum(member["chars"]) == len(member["text"])
    assert len(member["logprob"]) == len(member["chars"])
    place, letters = 0, []
    for size, level in zip(member["chars"], member["logprob"], strict=True):
        piece = member["text"][place : place + size]
        place += size
        if level == ".":
            letters.append("cut")
            assert piece == f"\n[... {len(text) - 6000:,} characters left out ...]\n"
        else:
            assert len(set(piece)) <= 1, "a piece is of one token"
            letters.append("")
    assert letters.count("cut") == (len(text) > 6000)


def test_a_long_run_has_a_small_report_with_samples_from_all_of_it(tmp_path):
    full_run(tmp_path, steps=30)
    for step in range(1, 31):
        group = [sample(step, i, response="z" * 500) for i in range(4)]
        write_lines(tmp_path / "samples" / f"step_{step:06d}.jsonl", group)
    everything = browser_data([("demo", tmp_path)])
    assert everything["files"] == everything["files_shown"] == 32
    some = browser_data([("demo", tmp_path)], budget=20_000)
    assert len(json.dumps(some)) < 21_000
    steps = sorted({group["step"] for group in some["groups"]})
    assert 4 < some["files_shown"] < 12 and {0, 30} < set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 8, "spread evenly"


def test_of_a_file_or_group_that_is_too_large_there_is_the_beginning(tmp_path):
    full_run(tmp_path, steps=2)
    huge, small = (
        [sample(0, i, group_id=name, prompt=name, response="z" * 500) for i in range(size)]
        for name, size in (("huge", 400), ("a", 2))
    )
    write_lines(tmp_path / "samples" / "eval_step_000000.jsonl", huge + small)
    write_lines(tmp_path / "samples" / "step_000001.jsonl", small + huge)
    data = browser_data([("demo", tmp_path)], budget=80_000)
    assert len(json.dumps(data)) < 80_000
    assert (data["files"], data["files_shown"], data["files_cut"]) == (4, 4, 2)
    first, second, *_ = data["groups"]
    assert first["prompt"] == "huge" and first["of"] == 400 and 10 <= len(first["members"]) < 20
    assert second["prompt"] == "a" and len(second["members"]) == 2 and "of" not in second
    everything = browser_data([("demo", tmp_path)])
    assert everything["files_cut"] == 0 and len(everything["groups"][0]["members"]) == 400


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.booleans())
def test_what_was_added_is_where_it_was_also_in_a_text_that_is_cut(sizes, added_first):
    """The policy says A, a tool B."""
    text, added = "", []
    for i, size in enumerate(sizes):
        if (i % 2 == 0) == added_first:
            added.append([len(text), len(text) + size])
        text += ("B" if (i % 2 == 0) == added_first else "A") * size
    member = member_of({"response": text, "added": added})
    marked = [False] * len(member["text"])
    for start, end in member.get("added", []):
        marked[start:end] = [True] * (end - start)
    letters = [letter for letter in zip(member["text"], marked, strict=True) if letter[0] in "AB"]
    assert len(letters) == min(len(text), 6000)
    assert all((letter == "B") == is_added for letter, is_added in letters)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, steps):
    records = [train_record(s, **{"critic/rewards/mean": 0.5}) for s in range(1, steps + 1)]
    write_lines(tmp_path / "metrics.jsonl", records)
    text, page = report(tmp_path)
    assert ("No step is logged yet." in text) == (steps == 0)
    assert page.tags.count("svg") == (2 if steps else 0)
    assert "None were kept." in text
    assert "recipe.yaml is missing" in text and "versions.json is missing" in text


def test_an_unfinished_run_without_evaluation_says_so(tmp_path):
    full_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"train"' in line][:5]
    (tmp_path / "metrics.jsonl").write_text("\n".join(kept) + '\n{"step": 6, "ki')
    for path in (tmp_path / "samples").glob("*"):
        path.unlink()
    text, page = report(tmp_path)
    assert "not finished: 5 of 12 steps" in text
    assert not [label for label in page.texts["div"] if label.startswith("eval")]


def test_values_that_were_not_finite_are_gaps(tmp_path):
    records = [
        train_record(s, **{"critic/rewards/mean": [0.5, None, 0.7][s - 1]}) for s in (1, 2, 3)
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    text, _ = report(tmp_path)
    assert [len(points.split()) for points in re.findall(r'points="([^"]*)"', text)] == [2, 2]


def test_a_step_that_was_logged_twice_counts_once(tmp_path):
    records = [train_record(1, **{"critic/rewards/mean": reward}) for reward in (0.25, 0.5)]
    write_lines(tmp_path / "metrics.jsonl", records)
    text, _ = report(tmp_path)
    assert '<div class="value">0.50</div>' in text and "0.25" not in text.partition("<svg")[0]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(LogError, match=r"no metrics\.jsonl.*runs/NAME"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["recipe.yaml", "versions.json"])
def test_a_broken_file_is_named(tmp_path, name):
    full_run(tmp_path)
    (tmp_path / name).write_text("{a: [")
    with pytest.raises(LogError, match=name):
        write_report(tmp_path)


# --- charts


def polyline(svg):
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in points.split()]


def test_equal_steps_of_a_log_axis_are_equally_far_apart_and_zero_lies_further_below():
    values = [1e-5, 1e-4, 1e-3, 1e-2, 0.0]
    svg = line_chart("gap", [Line("max", "red", list(enumerate(values)))], log=True)
    heights = [y for _, y in polyline(svg)]
    gaps = [a - b for a, b in pairwise(heights[:4])]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.11) and gaps[0] > 30
    assert heights[4] > heights[0] + gaps[0] and heights[0] == max(heights[:4])


def test_a_log_axis_of_zeros_only_is_drawn_linearly():
    svg = line_chart("gap", [Line("max", "red", [(1, 0.0), (2, 0.0)])], log=True)
    assert len({y for _, y in polyline(svg)}) == 1


def test_stacked_bars_stand_on_each_other():
    lines = [Line("a", "red", [(1, 3.0), (2, 1.0)]), Line("b", "blue", [(1, 1.0), (2, 0.0)])]
    bars = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', stacked_chart("t", lines))
    (a1_top, a1), (b1_top, b1), (_, a2), (_, b2) = [tuple(map(float, bar)) for bar in bars]
    assert b1_top + b1 == pytest.approx(a1_top, abs=0.11)
    assert a1 == pytest.approx(3 * b1, abs=0.4) and a2 == pytest.approx(b1, abs=0.11)
    assert b2 == 0


def test_a_long_run_is_thinned_out_but_its_peak_stays():
    points = [(step, 0.001) for step in range(10_000)]
    points[7777] = (7777, 0.9)
    svg = line_chart("gap", [Line("max", "red", points, keep_peaks=True)])
    assert svg.count('class="strip"') <= MOST_POINTS
    assert "max: 0.9" in svg


def test_curves_without_points_have_no_key():
    assert "two" not in legend([Line("one", "red", [(1, 1.0)]), Line("two", "blue", [])])


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.floats(-5, 5), st.floats(-5, 5))
def test_smoothing_leaves_a_straight_line_alone(count, start, slope):
    points = [(float(i), start + slope * i) for i in range(count)]
    for (x, y), (x_before, y_before) in zip(smoothed(points), points, strict=True):
        assert x == x_before
        assert y == pytest.approx(y_before, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low, span):
    marks = ticks(low, low + span)
    tolerance = span * 1e-6
    assert 2 <= len(marks) <= 11
    assert all(low - tolerance <= mark <= low + span + tolerance for mark in marks)
    steps = {round((b - a) / span, 6) for a, b in pairwise(marks)}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1234.0, "1234"), (12000.0, "12k"), (161500.0, "161.5k"),
     (4.029e6, "4.029M"), (2e-5, "2e-05"), (1.25e-4, "0.000125"), (-0.5, "-0.5"), (3e12, "3e+12")],
)  # fmt: skip
def test_tick_labels_are_short(value, text):
    assert tick(value) == text


def test_zero_has_a_place_of_its_own_below_what_is_drawn_by_powers_of_ten():
    """A gap of 0 is not one as large as the bound at which a run stops."""
    line = Line("max", "red", [(1, 0.0), (2, 1e-6), (3, 0.0)])
    svg = line_chart("gap", [line], log=True, limits=(("stops", 1e-3),))
    marks = re.findall(r'text-anchor="end">([^<]*)<', svg)
    assert marks == ["0", "1e-6", "1e-5", "1e-4", "1e-3", "step", "stops"]
    (limit,) = re.findall(r'class="limit".* y1="([\d.]+)"', svg)
    assert float(limit) < 30
