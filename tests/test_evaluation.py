"""Statistics against enumeration, comparisons on made files, and evaluations by real servers."""

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from servers import DROP, FaultyProxy, perturbed
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opo.batch import Group, Prompt, Sample
from megatron_opo.cli import main
from megatron_opo.errors import CheckpointError, LogError, RewardError
from megatron_opo.evaluation.compare import compare, read_evaluation
from megatron_opo.evaluation.run import make_out
from megatron_opo.evaluation.source import find_source
from megatron_opo.evaluation.statistics import (
    RESAMPLES,
    bootstrap,
    estimate_mean,
    sign_test,
    wilson,
)
from megatron_opo.evaluation.summary import estimates, majority
from megatron_opo.recipe import Recipe, RewardConfig
from megatron_opo.rewards.answers import answer_of
from megatron_opo.weights.megatron_save import save_megatron

EXACT = RewardConfig(function="exact")


def sample(text="", reward: float | None = 0.0, index=0, length=1, finish="stop", **info):
    ids = (7,) * length
    return Sample(
        "0", index, ids, (-0.5,) * length, (0,) * length, finish, text, reward=reward, **info
    )


def group(name, samples):
    return Group(Prompt(name, (3,), f"question {name}", "test", "4"), tuple(samples))


# --- statistics


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_ends_are_the_shares_at_1_96_of_their_own_deviations(case):
    successes, total = case
    found = successes / total
    low, high = wilson(successes, total)
    assert 0 <= low <= found <= high <= 1
    for end, is_bound in ((low, successes == 0), (high, successes == total)):
        deviation = math.sqrt(end * (1 - end) / total)
        if is_bound:
            assert end == found
        else:
            assert abs(found - end) == pytest.approx(1.959963984540054 * deviation, abs=1e-9)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=5).filter(lambda v: len(set(v)) > 1))
def test_the_bootstrap_finds_the_quantiles_of_all_resamples(eighths):
    values = [each / 8 for each in eighths]
    low, high = bootstrap(values)
    means = [sum(draw) / len(draw) for draw in itertools.product(values, repeat=len(values))]

    def share(below) -> float:
        return sum(map(below, means)) / len(means)

    error = 5 * math.sqrt(0.025 * 0.975 / RESAMPLES)
    assert share(lambda mean: mean < low - 1e-9) <= 0.025 + error
    assert share(lambda mean: mean <= low + 1e-9) >= 0.025 - error
    assert share(lambda mean: mean > high + 1e-9) <= 0.025 + error
    assert share(lambda mean: mean >= high - 1e-9) >= 0.025 - error


def test_the_bootstrap_of_many_prompts_has_the_width_of_the_normal_interval():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2000, generator=generator, dtype=torch.float64)
    low, high = bootstrap(values.tolist())
    half = 1.96 * values.std().item() / math.sqrt(2000)
    assert low == pytest.approx(values.mean().item() - half, abs=half / 20)
    assert high == pytest.approx(values.mean().item() + half, abs=half / 20)


def test_the_interval_is_chosen_by_what_the_values_can_be():
    right = estimate_mean([1.0] * 10, (0.0, 1.0))
    assert right.interval == "wilson"
    assert (right.low, right.high) == wilson(10, 10)
    assert right.low == pytest.approx(10 / (10 + 1.959963984540054**2))
    assert estimate_mean([0.0, 0.25], (0.0, 1.0)).interval == "bootstrap"
    assert estimate_mean([0.0, 1.0]).interval == "bootstrap"
    for values in ([0.5] * 9, [3.0]):
        same = estimate_mean(values)
        assert (same.value, same.low, same.high, same.interval) == (values[0], None, None, None)
    with pytest.raises(ValueError, match="no prompt"):
        estimate_mean([])


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_sign_test_counts_the_splits_that_are_as_uneven(wins, losses):
    splits = list(itertools.product((1, -1), repeat=wins + losses))
    uneven = sum(abs(sum(split)) >= abs(wins - losses) for split in splits)
    assert sign_test(wins, losses) == float(Fraction(uneven, len(splits)))


def test_the_sign_test_is_exact_for_thousands_of_prompts():
    assert sign_test(0, 1000) == 2.0**-999
    assert sign_test(2500, 2500) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["4", "5", "6", None]), min_size=1, max_size=5))
def test_the_majority_is_the_mean_over_all_orders_in_which_votes_come(answers):
    reward = RewardConfig(function="exact", kwargs={"extract": r"=(\d)"})
    samples = [
        sample("none" if answer is None else f"so ={answer}", float(answer == "4"))
        for answer in answers
    ]
    outcomes = []
    for order in itertools.permutations(answers):
        votes = Counter(answer for answer in order if answer is not None)
        outcomes.append(bool(votes) and votes.most_common(1)[0][0] == "4")
    expected = float(Fraction(sum(outcomes), len(outcomes)))
    assert majority(group("a", samples), reward) == pytest.approx(expected, abs=1e-12)


def test_estimates_of_two_prompts_are_the_hand_computed_ones():
    groups = [
        group("0", [sample("4", 1.0), sample("5", length=3), sample("5"), sample("4", 1.0)]),
        group("1", [sample("", None, finish="length"), *[sample("9", length=2)] * 3]),
    ]
    found = estimates(groups, EXACT)
    values = {name: each.value for name, each in found.items()}
    assert values == {
        "avg@4": 0.25,
        "pass@1": 0.25,
        "pass@2": pytest.approx((1 - 1 / 6) / 2),
        "pass@4": 0.5,
        "maj@4": 0.25,  # a tie of 4 and 5, and a wrong 9
        "response_length/mean": (6 / 4 + 7 / 4) / 2,
        "response_length/clip_ratio": 1 / 8,
    }
    assert found["pass@4"].interval == "wilson"
    assert found["avg@4"].interval == "bootstrap"


def test_rewards_of_other_values_than_0_and_1_get_no_binomial_interval():
    assert estimates([group("0", [sample(reward=1.0)])] * 3, EXACT)["avg@1"].interval == "wilson"
    graded = [group("0", [sample(reward=r) for r in (2.0, 0.0)]), group("1", [sample()] * 2)]
    found = estimates(graded, EXACT)["avg@2"]
    assert (found.value, found.interval) == (0.5, "bootstrap")


def test_samples_of_which_none_could_be_scored_are_an_error_with_the_reasons():
    broken = sample(reward=None, reward_error="KeyError: 'answer'")
    with pytest.raises(RewardError, match=r"none of the 2 samples .*\nKeyError: 'answer'"):
        estimates([group("0", [broken, broken])], EXACT)


# --- answers


@pytest.mark.parametrize(
    ("function", "kwargs", "text", "answer"),
    [
        ("exact", {}, " yes \n", "yes"),
        ("exact", {"extract": r"#(\w+)"}, "#a then #b", "b"),
        ("exact", {"extract": r"#(\w+)"}, "nothing", None),
        ("numeric", {}, "it is 1,234.50.", "2469/2"),
        ("numeric", {}, "no idea", None),
        ("reasoning_gym", {}, "<answer>x</answer> or <answer> y </answer>", "y"),
        ("reasoning_gym", {}, " plain ", "plain"),
        ("reasoning_gym", {"extract": r"\d"}, "1 2", "2"),
        ("math", {}, r"first \boxed{1}, no: \boxed{\frac{1}{2}}", "1/2"),
        ("math", {}, r"\boxed{0.5} is 3 of 6", "1/2"),
        ("math", {}, r"\boxed{ x^{2} + 1 }", "x^{2}+1"),
        ("math", {}, r"\boxed{cut", r"\boxed{cut"),
        ("math", {}, "12 apples, so 7", "7"),
        ("file.py:f", {}, "think\n\n  north \n", "north"),
        ("file.py:f", {}, "", None),
    ],
)
def test_the_answer_of_a_response(function, kwargs, text, answer):
    reward = RewardConfig(function=function, kwargs=kwargs)
    assert answer_of(sample(text), reward) == answer
    assert answer_of(sample(text, None), reward) is None


def test_what_a_function_says_it_has_compared_is_the_answer():
    reward = RewardConfig(function="file.py:f")
    assert answer_of(sample("so 7", reward_info={"pred": " 8 "}), reward) == "8"
    assert answer_of(sample("so 7", reward_info={"pred": None}), reward) is None


# --- which checkpoint


def recipe_of(model="start", **changes) -> Recipe:
    data = {"train": {"files": ["t.jsonl"]}}
    return Recipe.model_validate(
        {"name": "mine", "model": {"path": str(model)}, "data": data} | changes
    )


def make_run(root: Path, exported=(), saved=()) -> Path:
    for step in exported:
        (root / "hf" / f"step_{step}").mkdir(parents=True)
        (root / "hf" / f"step_{step}" / "config.json").write_text("{}")
    for step in saved:
        (root / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (root / "checkpoints" / f"step_{step}" / "state.json").write_text("{}")
    return root


def test_a_run_means_its_newest_step_and_rather_the_exported_model(tmp_path):
    run = make_run(tmp_path / "run", exported=[9, 20], saved=[20, 100])
    recipe = recipe_of()
    newest = find_source(str(run), recipe)
    assert (newest.path, newest.is_megatron) == (run / "checkpoints" / "step_100", True)
    assert newest.default_out(recipe) == run / "eval" / "step_100"
    exported = find_source(f"{run}:20", recipe)
    assert (exported.path, exported.is_megatron) == (run / "hf" / "step_20", False)
    direct = find_source(str(run / "hf" / "step_9"), recipe)
    assert direct.default_out(recipe) == run / "eval" / "step_9"
    with pytest.raises(CheckpointError, match=r"nothing of step 7; it has steps 9, 20, 100"):
        find_source(f"{run}:7", recipe)


def test_without_a_checkpoint_the_start_of_the_recipe_is_evaluated(tmp_path):
    model = tmp_path / "start:1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    recipe = recipe_of(model)
    source = find_source(None, recipe)
    assert (source.path, source.is_megatron) == (model, False)
    assert source.default_out(recipe) == Path("runs/mine/eval/start:1")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nowhere", "nowhere does not exist: give a Hugging Face model directory"),
        ("run:x", "'x' is no step; write RUN:STEP"),
        ("hf:3", "hf is a Hugging Face model directory; drop :3"),
        ("empty:3", "empty is no run directory with checkpoints; drop :3"),
        ("empty", "empty holds no metadata.json"),
    ],
)
def test_what_is_no_checkpoint_is_refused(asked, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match=message):
        find_source(asked, recipe_of())


def test_an_evaluation_is_not_written_over(tmp_path):
    make_out(tmp_path / "new" / "out")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(LogError, match=r"--out: .* holds an evaluation already"):
        make_out(tmp_path)
    with pytest.raises(LogError, match="cannot be made"):
        make_out(tmp_path / "summary.json" / "below")


# --- comparisons


def write_evaluation(out: Path, rewards: dict[str, list[float | None]], **settings) -> Path:
    out.mkdir()
    k = len(next(iter(rewards.values())))
    summary = {"samples_per_prompt": k, "prompts": len(rewards), "settings": settings}
    (out / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"group_id": name, "prompt": f"question {name}", "ground_truth": "4", "reward": reward}
        for name, each in rewards.items()
        for reward in each
    ]
    (out / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=4, max_size=4),
        min_size=2,
        max_size=8,
    )
)
def test_a_comparison_counts_by_prompt_and_turns_around_with_its_sides(tmp_path_factory, rows):
    root = tmp_path_factory.mktemp("pair")
    a = read_evaluation(write_evaluation(root / "a", {str(i): r[:2] for i, r in enumerate(rows)}))
    b = read_evaluation(write_evaluation(root / "b", {str(i): r[2:] for i, r in enumerate(rows)}))
    found, turned = compare(a, b), compare(b, a)
    tenths = [round(10 * sum(r[2:])) - round(10 * sum(r[:2])) for r in rows]
    assert found["wins"] == turned["losses"] == sum(each > 0 for each in tenths)
    assert found["losses"] == turned["wins"] == sum(each < 0 for each in tenths)
    assert found["ties"] == sum(each == 0 for each in tenths)
    difference = found["difference"]["value"]
    assert difference == pytest.approx(sum(tenths) / 20 / len(rows), abs=1e-12)
    assert difference == pytest.approx(found["b"]["avg"] - found["a"]["avg"], abs=1e-12)
    assert found["sign_test_p"] == turned["sign_test_p"]
    sizes = [abs(each["b"] - each["a"]) for each in found["changed_most"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == found["wins"] + found["losses"]


def test_pairs_that_agree_make_a_difference_more_certain(tmp_path):
    hard = {str(i): [float(i % 2)] * 2 for i in range(40)}
    better = {name: [1.0, 1.0] if name == "0" else each for name, each in hard.items()}
    write_evaluation(tmp_path / "a", hard, temperature=1.0)
    write_evaluation(tmp_path / "b", better, temperature=0.5)
    found = compare(*map(read_evaluation, (tmp_path / "a", tmp_path / "b")))
    assert found["difference"]["value"] == pytest.approx(1 / 40)
    # Unpaired, each side alone would be uncertain by 0.15.
    assert found["difference"]["high"] - found["difference"]["low"] < 0.1
    assert (found["wins"], found["losses"], found["ties"]) == (1, 0, 39)
    assert found["changed_most"] == [{"group_id": "0", "prompt": "question 0", "a": 0.0, "b": 1.0}]
    assert found["settings_that_differ"] == {"temperature": [1.0, 0.5]}


def test_the_command_shows_a_comparison_and_gives_it_to_programs(tmp_path, capsys):
    rewards: dict[str, list[float | None]] = {"0": [0.0, 1.0], "1": [None, 1.0], "2": [1.0, 1.0]}
    a = write_evaluation(tmp_path / "a", rewards)
    b = write_evaluation(tmp_path / "b", rewards | {"1": [1.0, 1.0]})
    shown = []
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["eval", "--compare", str(a), str(b), *extra])
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert "1 better in B, 0 worse, 2 the same (sign test: p = 1)" in shown[0]
    assert "0.500 -> 1.000" in shown[0]
    assert json.loads(shown[1])["difference"]["value"] == pytest.approx(1 / 6)


def test_evaluations_that_are_no_pair_are_refused(tmp_path):
    rewards: dict[str, list[float | None]] = {"0": [0.0, 1.0], "1": [0.0, 1.0]}
    a = read_evaluation(write_evaluation(tmp_path / "a", rewards))
    fewer = read_evaluation(write_evaluation(tmp_path / "k", {"0": [0.0], "1": [1.0]}))
    other = read_evaluation(write_evaluation(tmp_path / "p", {"0": [0.0, 1.0], "7": [0.0, 0.0]}))
    with pytest.raises(LogError, match="they have 2 and 1 samples of each prompt"):
        compare(a, fewer)
    with pytest.raises(LogError, match=r"1 prompts are in both, 1 only in the first and 1 only"):
        compare(a, other)


def test_what_is_no_whole_evaluation_is_refused(tmp_path):
    with pytest.raises(LogError, match=r"has no summary\.json"):
        read_evaluation(tmp_path)
    out = write_evaluation(tmp_path / "a", {"0": [0.0, 1.0], "1": [0.0, 1.0]})
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(LogError, match=r"3 samples of 2 prompts, .* says 2 prompts x 2"):
        read_evaluation(out)
    (out / "samples.jsonl").write_text('{"group_id": "0"}\n')
    with pytest.raises(LogError, match="is no sample"):
        read_evaluation(out)
    (out / "summary.json").write_text("[]")
    with pytest.raises(LogError, match="evaluate again"):
        read_evaluation(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no recipe is given"),
        (["--compare", "a", "b", "--samples", "2"], "drop what else is given"),
        (["r.yaml", "--samples", "0"], "--samples: 0; it must be 1 or more"),
        (["--samples", "2", "r.yaml", "seed=7"], "recipe r.yaml: no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_told(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- with servers


def greedy_text(directory: Path, prompt: str, count: int) -> str:
    """What transformers says."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def evaluation_of(recipe: Path, *words: str, capsys) -> tuple[dict, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(recipe), *words, "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    return json.loads(shown.out), shown.err


def trained_model(pool, directory: Path) -> Path:
    """Other weights than those that the pool's servers start with."""
    directory.mkdir()
    for file in Path(pool.model.path).iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    weights = perturbed(pool.weights(), seed=3)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_recipe(pool, directory: Path, answers: dict[str, str]) -> Path:
    rows = [json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in answers.items()]
    (directory / "eval.jsonl").write_text("".join(rows))
    recipe = {
        "name": "mine",
        "model": {"path": pool.model.path, "dtype": "float32"},
        "data": {
            "train": {"files": ["not_needed.jsonl"]},
            "eval": {"files": [str(directory / "eval.jsonl")]},
            "apply_chat_template": False,
            "max_prompt_tokens": 16,
        },
        "reward": {"function": "exact", "workers": 1},
        "rollout": {
            "urls": [server.url for server in pool.servers],
            "max_response_tokens": 6,
            "health_every_s": 0.5,
            "health_timeout_s": 1.0,
        },
        "eval": {"temperature": 0.0},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return directory / "recipe.yaml"


def silent_for_a_while() -> Callable[[str, dict], Any]:
    """From the first sample on, for longer than health_timeout_s."""
    began: list[float] = []

    def plan(path: str, _: dict) -> Any:
        if began:
            return DROP if time.monotonic() < began[0] + 3 else None
        if path == "/generate":
            began.append(time.monotonic())
        return None

    return plan


def test_a_checkpoint_is_given_to_servers_again_and_again(qwen_pool, tmp_path, capsys):
    """Of a run, converted; and as it is, by a server that is lost meanwhile."""
    start, trained = Path(qwen_pool.model.path), trained_model(qwen_pool, tmp_path / "trained")
    run = tmp_path / "run"
    saved = run / "checkpoints" / "step_3"
    saved.parent.mkdir(parents=True)
    save_megatron(saved, trained)
    state = {"recipe": {"model": {"path": str(start)}}}
    (saved / "state.json").write_text(json.dumps(state))
    questions = ["1+1=", "20+3=", "name: "]
    said = [greedy_text(trained, question, 6) for question in questions]
    assert said != [greedy_text(start, question, 6) for question in questions]
    recipe = write_recipe(qwen_pool, tmp_path, dict.fromkeys(questions, "no") | {"1+1=": said[0]})
    proxy = FaultyProxy(qwen_pool.servers[0].url, plan=silent_for_a_while())
    out, other = run / "eval" / "step_3", tmp_path / "other"
    words = ["--checkpoint", str(trained), "--samples", "2", "--out", str(other)]
    try:
        found, _ = evaluation_of(recipe, "--checkpoint", str(run), "--samples", "2", capsys=capsys)
        with proxy:
            words.append(f"rollout.urls=[{proxy.url}]")
            again, told = evaluation_of(recipe, *words, capsys=capsys)
    finally:
        qwen_pool.rollout().sync(iter(qwen_pool.weights().items()), qwen_pool.version)
    assert json.loads((out / "summary.json").read_text()) == found
    assert {path.name for path in out.iterdir()} == {"recipe.yaml", "samples.jsonl", "summary.json"}
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines] == [text for text in said for _ in range(2)]
    values = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert values["avg@2"] == values["pass@2"] == values["maj@2"] == pytest.approx(1 / 3)
    assert found["metrics"]["avg@2"]["interval"] == "wilson"
    assert "Sampling goes on when a server has been given the weights" in told
    assert again["metrics"] == found["metrics"]
    same = compare(read_evaluation(out), read_evaluation(other))
    assert (same["ties"], same["settings_that_differ"]) == (3, {})
