"""The pages in a real browser: what they draw, show and let one find, and what they never do."""

import json
from functools import partial
from itertools import pairwise

import pytest
from browser import browser, why_no_browser
from test_comparison import make_run
from test_report import full_run, sample, train_record, write_lines

from megatron_opo.observe.comparison import write_comparison
from megatron_opo.observe.report import write_report
from megatron_opo.observe.watch_server import serving

PHONE = 390
HOSTILE = '</script><script>hit = 1</script></pre><img src=x onerror="hit = 2"><b>bold</b>'
# Shows as if it ended in "tpircs.exe"; the reader is to see that there is something.
TURNED = "end \u202eexe.scripT\u2066 of"

# Titles of charts to the number of points of each curve, of what has been drawn at some size.
CURVES = """Object.fromEntries([...document.querySelectorAll(".panel")].flatMap((panel) => {
  const drawings = [...panel.querySelectorAll("svg")];
  const svg = drawings.find((each) => each.getBoundingClientRect().height);
  const lines = [...(svg?.querySelectorAll("polyline") ?? [])];
  if (lines.some((line) => !line.getBBox().width)) return [];
  return lines.length ? [[panel.querySelector("h3").textContent,
    lines.map((line) => line.points.numberOfItems)]] : [];
}))"""
RESPONSES = """[...document.querySelectorAll("#groups .card:not(.other) pre")]
  .map((pre) => pre.textContent)"""
# Of every element that nothing cuts off or lets scroll, how far it reaches to the right.
REACH = """Math.max(...[...document.querySelectorAll("body *")].filter((node) => {
  for (let up = node.parentElement; up; up = up.parentElement) {
    if (!["visible", "clip"].includes(getComputedStyle(up).overflowX)) return false;
  }
  return true;
}).map((node) => node.getBoundingClientRect().right))"""


@pytest.fixture(scope="module")
def chromium():
    if obstacle := why_no_browser():
        pytest.skip(f"no browser for tests: {obstacle}")
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium):
    """opened(file): a page that shows it, which must be content and must ask for nothing else."""
    pages = []

    def open_file(path, **size):
        page = chromium.page(**size)
        pages.append((page, path.as_uri()))
        page.open(path.as_uri())
        return page

    yield open_file
    for page, address in pages:
        assert page.problems == [] and page.requests == [address]
        page.close()


TOKENS = {
    "token_chars": [1, 2, 2, 0],
    "token_logprobs": [-0.01, -1.5, -6.0, -1.0],
    "token_entropies": [0.1, 3.0, 1.0, None],
    "token_gaps": [0.0, 1e-4, None, 1e-5],
}


@pytest.fixture(scope="module")
def records():
    """Of steps 1 and 12: two groups of three responses each."""
    found = []
    for step in (1, 12):
        for group in ("a", "b"):
            for i in range(3):
                fields = TOKENS if group == "a" and i == 0 else {}
                found.append(
                    sample(
                        step, i, group_id=group, prompt=f"What is {group} + {step}?",
                        response=f"{group}{step:02}.{i}" + "!" * (not fields), length=3 + i + step,
                        reward=[1.0, 0.25, 0.0][i], advantage=[0.5, -0.25, -0.5][i], baseline=0.5,
                        finish_reason="length" if i == 1 else "stop", **fields,
                    )
                )  # fmt: skip
    return found


@pytest.fixture
def report(tmp_path, records):
    full_run(tmp_path)
    for file in (tmp_path / "samples").iterdir():
        file.unlink()
    for step in (1, 12):
        of_step = [record for record in records if record["step"] == step]
        write_lines(tmp_path / "samples" / f"step_{step:06d}.jsonl", of_step)
    return write_report(tmp_path)


def fill(page, **fields):
    """Set filters as a reader does, starting from none."""
    page.run("document.querySelector('.filters').reset()")
    for name, value in fields.items():
        field = f"document.querySelector('.filters').elements[{json.dumps(name)}]"
        page.run(
            f"{field}[{field}.type === 'checkbox' ? 'checked' : 'value'] = {json.dumps(value)}"
        )
    page.run("document.querySelector('.filters').dispatchEvent(new Event('input'))")


def shows(page, script, expected):
    """Wait until it does, and say what it shows if it never does."""
    text = json.dumps(expected, separators=(",", ":"), ensure_ascii=False)
    try:
        page.wait(f"JSON.stringify({script}) === {json.dumps(text)}")
    except TimeoutError:
        assert page.run(script) == expected


def test_every_curve_is_drawn_with_its_points(report, opened):
    for width in (1280, PHONE):
        page = opened(report, width=width, phone=width == PHONE)
        assert page.run(CURVES) == {
            "Reward": [12, 2, 2], "Response length": [12], "Entropy": [12], "Logprob gap": [12, 12],
            "Gradient norm": [12], "Baseline": [12], "Shares": [12, 12],
        }  # fmt: skip
        bars = "[...document.querySelectorAll('.timing svg')].find((svg) => svg.clientHeight)"
        assert page.run(f"{bars}.querySelectorAll('g').length") == 12


def test_a_tap_shows_the_numbers_of_a_step(report, opened):
    page = opened(report, width=PHONE, height=844, phone=True)
    page.run("document.querySelector('.narrow').scrollIntoView({block: 'center'})")
    strip = "document.querySelector('.narrow .strip:nth-of-type(13) rect')"
    box = page.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                   f"({strip}.getBoundingClientRect())")  # fmt: skip
    page.tap(*box)
    shown = page.wait("document.querySelector('.numbers').innerText")
    assert shown == "step 12\ntraining reward: 0.75\neval avg@4: 0.75\neval pass@4: 1"
    assert page.run(REACH) <= PHONE
    page.tap(box[0], 5)
    page.wait("document.querySelector('.numbers').hidden")


def test_each_filter_leaves_what_it_says(report, opened, records):
    page = opened(report)
    filters = [
        ({"step": "12"}, lambda r: r["step"] == 12),
        ({"reward_from": "0.2", "reward_to": "0.5"}, lambda r: 0.2 <= r["reward"] <= 0.5),
        ({"length_from": "16"}, lambda r: r["length"] >= 16),
        ({"length_to": "5"}, lambda r: r["length"] <= 5),
        ({"cut": True}, lambda r: r["finish_reason"] == "length"),
        ({"text": "B12"}, lambda r: "b12" in r["response"]),
        ({"text": "is a + 1?"}, lambda r: r["prompt"] == "What is a + 1?"),
        ({"step": "1", "cut": True, "text": "is a"}, lambda r: r["response"] == "a01.1!"),
        ({"text": "nowhere"}, lambda r: False),
        ({}, lambda r: True),
    ]
    for fields, wanted in filters:
        fill(page, **fields)
        expected = [record["response"] for record in records if wanted(record)]
        shows(page, RESPONSES, expected)
        found = page.run("document.getElementById('found').textContent")
        assert found.startswith(f"{len(expected)} response")
    fill(page, text="b12.1")
    shows(page, "[...document.querySelectorAll('mark')].map((m) => m.textContent)", ["b12.1"])
    others = "document.querySelectorAll('#groups .card.other').length"
    assert page.run(others) == 2, "the rest of its group stays beside it"
    assert page.run("location.hash") == "#text=b12.1"


def test_a_group_stands_side_by_side_under_a_title_of_its_own(report, opened):
    page = opened(report)
    titles = page.run("[...document.querySelectorAll('.group h3')].map((h) => h.textContent)")
    assert titles == [
        f"training, step {step}: What is {group} + {step}?" for step in (1, 12) for group in "ab"
    ]
    first = "document.querySelector('.group')"
    facts = page.run(f"{first}.querySelector('header span').textContent")
    assert facts == "3 responses; rewards 1, 0.25, 0; mean 0.417; baseline 0.5"
    cards = page.run(f"""[...{first}.querySelectorAll(".card")].map((card) => {{
      const box = card.getBoundingClientRect();
      return [box.left, box.right, box.top, card.querySelector("header").textContent];
    }})""")
    for (_, right, top, _), (left, _, other_top, _) in pairwise(cards):
        assert top == other_top and left >= right
    for (*_, header), reward, advantage in zip(
        cards, ("1", "0.25", "0"), ("+0.5", "-0.25", "-0.5"), strict=True
    ):
        assert f"reward {reward}" in header and f"advantage {advantage}" in header


@pytest.mark.parametrize(
    ("name", "title"), [("logprob", "-1.5"), ("entropy", "3"), ("gap", "0.0001")]
)
def test_tokens_are_coloured_by_how_far_their_value_is_from_0(report, opened, name, title):
    page = opened(report)
    fill(page, color=name, step="1", text="a01.0")
    spans = "document.querySelectorAll('#groups .card:not(.other) pre.tokens > span')"
    shows(page, f"[...{spans}].map((span) => span.textContent)", ["a", "01", ".0"])
    shares = page.run(f"""[...{spans}].map((span) =>
      Number(/([.0-9]+)%/.exec(span.style.backgroundColor)?.[1] ?? 0))""")
    key = {"logprob": "token_logprobs", "entropy": "token_entropies", "gap": "token_gaps"}[name]
    sizes = [abs(value or 0) for value in TOKENS[key][:3]]
    order = sorted(range(3), key=lambda i: sizes[i])
    assert sorted(range(3), key=lambda i: shares[i]) == order
    assert len({share for share, size in zip(shares, sizes, strict=True) if size}) == len(
        [size for size in sizes if size]
    )
    assert title in page.run(f"{spans}[1].title")
    assert name in page.run("document.querySelector('.scale').textContent")


@pytest.mark.parametrize("color", ["", "logprob"])
def test_what_others_added_to_a_response_is_told_from_what_the_policy_said(tmp_path, opened, color):
    full_run(tmp_path)
    text = "2+3=\U0001f600 5, so 5"
    response = sample(
        12, prompt="p", response=text, added=[[4, 7]], token_chars=[1, 3, 3, 6],
        token_logprobs=[-1.0, -0.5, None, -0.1],
    )  # fmt: skip
    write_lines(tmp_path / "samples" / "step_000012.jsonl", [response])
    page = opened(write_report(tmp_path))
    fill(page, color=color, text="so 5")
    shows(page, RESPONSES, [text])
    assert page.run("document.querySelector('#groups .added').textContent") == "\U0001f600 5"
    plain = "getComputedStyle(document.querySelector('#groups pre')).boxShadow"
    marked = "getComputedStyle(document.querySelector('#groups .added')).boxShadow"
    assert page.run(f"{plain} !== {marked}")
    assert page.run("document.getElementById('speakers').offsetHeight > 0"), "and a key to it"
    # The cards above have it without a script.
    assert page.run("document.querySelector('#samples pre .added').textContent") == "\U0001f600 5"


def test_runs_lie_over_each_other_with_a_band_over_seeds(tmp_path, opened):
    opo, grpo = {"algorithm": {"estimator": "opo"}}, {"algorithm": {"estimator": "grpo"}}
    runs = [
        make_run(tmp_path / "opo_s0", [0.1, 0.25, 0.5], seed=0, **opo),
        make_run(tmp_path / "opo_s1", [0.3, 0.75, 0.5], seed=1, **opo),
        make_run(tmp_path / "grpo", [0.2, 0.4], seed=0, **grpo),
    ]
    page = opened(write_comparison(runs, tmp_path / "comparison.html"))
    assert page.run(CURVES)["Training reward"] == [3, 2]
    hero = "document.querySelector('#curves .wide')"
    assert page.run(f"{hero}.querySelectorAll('polygon').length") == 1
    heights = page.run(f"""[...{hero}.querySelector("polygon").points].map((point) => point.y)""")
    # Its upper edge from step 1 to 3, its lower one back.
    tall = [heights[5] - heights[0], heights[4] - heights[1], heights[3] - heights[2]]
    assert [height / tall[0] for height in tall] == pytest.approx([1, 2.5, 0], abs=0.02)
    keys = f"[...{hero}.parentElement.querySelectorAll('.key')].map((key) => key.textContent)"
    assert page.run(keys) == ["opo (2 runs)", "grpo"]
    rows = "[...document.querySelectorAll('#recipes tr')].map((r) => r.innerText.split('\\t'))"
    assert page.run(rows)[1:] == [["algorithm.estimator", "opo", "grpo"]]
    fill(page, run="1")
    shows(page, RESPONSES, ["of opo_s1"])


def luminance(color):
    """Of WCAG 2, from "rgb(1, 2, 3)"."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(report, opened, scheme):
    page = opened(report)
    page.prefer(scheme)
    style = "getComputedStyle(document.querySelector({!r})).{}".format
    for text, behind in [
        ("h1", "body"), (".about", "body"), (".tile .note", ".tile"), (".card header", ".card"),
        (".good .badge", ".card"), (".bad .badge", ".card"), ("pre", "pre"), ("svg text", ".panel"),
        (".filters label", "body"), ("button", "button"),
    ]:  # fmt: skip
        field = "fill" if text == "svg text" else "color"
        pair = page.run(f"[{style(text, field)}, {style(behind, 'backgroundColor')}]")
        front, back = map(luminance, pair)
        assert (front > back) == (scheme == "dark")
        assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= 4.5, (text, pair)


def test_a_phone_shows_all_of_it_without_scrolling_sideways(tmp_path, opened):
    full_run(tmp_path)
    long = "unbroken" * 60
    response = sample(12, prompt=long, response=long, ground_truth=long, reward_error=long)
    write_lines(tmp_path / "samples" / "step_000012.jsonl", [response] * 5)
    records = [
        train_record(s, **{f"reward/{long}": 1.0, "critic/rewards/mean": s / 9}) for s in (1, 2)
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    (tmp_path / "recipe.yaml").write_text(f"name: {long}\nmodel: {{path: a/{long}}}\n")
    single = write_report(tmp_path)
    runs = [make_run(tmp_path / f"{long[:60]}{i}", [0.1, 0.2], optimizer={"lr": i}) for i in (1, 2)]
    for path in (single, write_comparison(runs, tmp_path / "comparison.html")):
        page = opened(path, width=PHONE, height=844, phone=True)
        page.run("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        assert page.run("document.documentElement.scrollWidth") == PHONE
        assert page.run(REACH) <= PHONE


def test_what_a_model_wrote_is_text_and_does_nothing(tmp_path, opened):
    full_run(tmp_path)
    hostile = partial(sample, prompt=HOSTILE, ground_truth=HOSTILE, reward_error=HOSTILE)
    responses = [hostile(12, 0, response=HOSTILE, reward=1.0), hostile(12, 1, response=TURNED)]
    write_lines(tmp_path / "samples" / "step_000012.jsonl", responses)
    (tmp_path / "recipe.yaml").write_text(json.dumps({"name": HOSTILE}))
    page = opened(write_report(tmp_path))
    fill(page, step="12", kind="train")
    seen = TURNED.replace("\u202e", "\u2426").replace("\u2066", "\u2426")
    shows(page, RESPONSES, [HOSTILE, seen])
    cards = page.run("[...document.querySelectorAll('#samples pre')].map((pre) => pre.textContent)")
    assert {HOSTILE, seen} <= set(cards)
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    assert page.run("typeof hit") == "undefined"
    assert page.run("document.querySelectorAll('img, b > b').length") == 0
    assert page.run("document.querySelectorAll('script').length") == 3


def test_a_watched_run_goes_on_in_the_page_that_is_open(tmp_path, chromium):
    with serving(tmp_path, 0) as address:
        page = chromium.page()
        page.open(address)
        assert "no step is logged yet" in page.run("document.body.innerText")
        assert len(page.problems) == 1, "its status, 503"
        full_run(tmp_path, steps=3)
        page.wait("document.getElementById('browser') && document.readyState === 'complete'")
        page.run("document.getElementById('recipe').open = true; mark = 'of this page'")
        fill(page, text="r1")
        shows(page, RESPONSES, ["r1", "r1"])
        assert page.run(CURVES)["Reward"] == [3, 2, 2]
        full_run(tmp_path, steps=4)
        page.wait(f"({CURVES}).Reward[0] === 4")
        shows(page, RESPONSES, ["r1", "r1", "r1"])
        assert "4 of 4 steps" in page.run("document.querySelector('h1 + p').textContent")
        state = "[mark, document.getElementById('recipe').open, location.hash]"
        assert page.run(state) == ["of this page", True, "#text=r1"], "it was not loaded anew"
        assert all("503" in problem for problem in page.problems)
        asked = {request.partition("#")[0].removeprefix(address) for request in page.requests}
        assert asked - {"favicon.ico"} == {"", "version"}
        page.close()
