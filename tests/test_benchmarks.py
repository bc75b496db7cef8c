"""The benchmarks run, and measure what they say they do."""

import json
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opo.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, which import one another

import convert  # noqa: E402
import rollout_client  # noqa: E402
import variance  # noqa: E402
import variance_moments as moments  # noqa: E402
import variance_policy as policies  # noqa: E402


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    """Small, and trained for long enough to write answers, but not right ones."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    tool = [sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), "--out", str(out)]
    subprocess.run([*tool, "--steps", "150", "--size", "64"], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def policy(tiny_directory) -> policies.Policy:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_directory, dtype=torch.float64, attn_implementation="eager"
    )
    recipe = load_recipe(ROOT / "recipes" / "quickstart_cpu.yaml")
    return policies.Policy(model.eval(), AutoTokenizer.from_pretrained(tiny_directory), recipe)


def ask(policy: policies.Policy, text: str, answer: str) -> policies.Question:
    return policies.Question(tuple(policy.tokenizer(text)["input_ids"]), answer)


def logprob(policy: policies.Policy, prompt, response) -> torch.Tensor:
    """Of a response, by one plain forward pass over it alone."""
    logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0]
    picked = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt + response) - 1), response]
    return picked.sum()


def test_samples_follow_the_policy(policy):
    """Whole responses are as frequent as the model says, for two questions of unlike lengths."""
    questions = [ask(policy, "5+4=", "9"), ask(policy, "12+30=", "42"), ask(policy, "3+3=", "6")]
    count = 1500
    samples = policies.sample(policy, questions, count, np.random.default_rng(0))
    for question, responses in zip(questions, samples, strict=True):
        assert len(responses) == count
        assert all(
            response[-1] == policy.tokenizer.eos_token_id or len(response) == policy.limit
            for response in responses
        )
        common = sorted(set(responses), key=responses.count)[-8:]
        for response in common:
            with torch.no_grad():
                expected = logprob(policy, question.prompt, response).exp().item()
            found = responses.count(response) / count
            deviation = (expected * (1 - expected) / count) ** 0.5
            assert abs(found - expected) < 5 * deviation


def test_gradients_of_sequences_are_those_of_backward(policy):
    question = ask(policy, "48+76=", "124")
    responses = policies.sample(policy, [question], 5, np.random.default_rng(0))[0]
    gradients = policies.sequence_gradients(policy, question.prompt, responses)
    for response, gradient in zip(responses, gradients, strict=True):
        policy.model.zero_grad()
        logprob(policy, question.prompt, response).backward()
        expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        # The model's attention and norms round to float32, whatever its parameters are.
        assert (gradient - expected).norm() < 1e-5 * expected.norm()


def enumerate_groups(probabilities, rewards, lengths, advantages_of) -> tuple[list, Fraction]:
    """Exact mean and trace of the covariance of a pair's gradient of the logits."""
    kinds = range(len(probabilities))
    mean, second = [Fraction(0)] * len(probabilities), Fraction(0)
    for pair in product(kinds, kinds):
        chance = probabilities[pair[0]] * probabilities[pair[1]]
        advantages = advantages_of([rewards[i] for i in pair], [lengths[i] for i in pair])
        gradient = [
            sum(a * ((i == k) - probabilities[k]) for i, a in zip(pair, advantages, strict=True))
            / 2
            for k in kinds
        ]
        mean = [m + chance * g for m, g in zip(mean, gradient, strict=True)]
        second += chance * sum(g * g for g in gradient)
    return mean, second - sum(m * m for m in mean)


PAIR_ADVANTAGES = {
    "none": lambda r, lengths: r,
    "mean": lambda r, lengths: [x - sum(r) / 2 for x in r],
    "rloo": lambda r, lengths: [r[0] - r[1], r[1] - r[0]],
    "opo": lambda r, lengths: [
        x - sum(a * b for a, b in zip(r, lengths, strict=True)) / sum(lengths) for x in r
    ],
    "opo_leave_one_out": lambda r, lengths: [r[0] - r[1], r[1] - r[0]],
}


def test_moments_are_those_of_an_enumerated_policy():
    """Three responses, pairs: means, variances and biases as exact fractions have them."""
    probabilities = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    rewards, lengths = [Fraction(1), Fraction(0), Fraction(1, 2)], [1, 3, 6]
    count = 8000
    p = torch.tensor([float(x) for x in probabilities], dtype=torch.float64)
    gradients = torch.eye(3, dtype=torch.float64) - p
    answers = moments.Answers(
        index=torch.tensor([0] * (count // 2) + [1] * (count // 4) + [2] * (count // 4)),
        rewards=torch.tensor([float(x) for x in rewards], dtype=torch.float64),
        lengths=torch.tensor(lengths, dtype=torch.float64),
        energies=torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64),
        gram=gradients @ gradients.T,
        constants={"optimum": 0.25, "E r": 0.6, "E l r / E l": 0.4, "E W r / E W": 0.7},
        mean_length=2.75,
    )
    found, coefficients = moments.group_moments(answers, 2, 20, torch.Generator().manual_seed(0))
    gradient = [Fraction(3, 16), Fraction(-5, 32), Fraction(-1, 32)]
    signal = float(sum(x * x for x in gradient))
    for name, advantages_of in PAIR_ADVANTAGES.items():
        mean, variance = enumerate_groups(probabilities, rewards, lengths, advantages_of)
        e = moments.COMPARED.index(name)
        second, first, _, _, best = found[0, e].tolist()
        bias = [m - g for m, g in zip(mean, gradient, strict=True)]
        assert second - first == pytest.approx(float(variance), rel=0.01), name
        assert best == pytest.approx(signal, rel=0.02), name
        assert first == pytest.approx(float(sum(m * m for m in mean)), rel=0.02), name
        assert (coefficients[e] @ gradients).tolist() == pytest.approx(
            [float(m) for m in mean], abs=0.002
        ), name
        if name in moments.PAIRED:
            along = float(sum(b * g for b, g in zip(bias, gradient, strict=True)))
            assert found[0, e, 2].item() == pytest.approx(
                float(sum(b * b for b in bias)), rel=0.03
            ), name
            assert found[0, e, 3].item() == pytest.approx(along, rel=0.03), name
        else:
            assert bias == [0, 0, 0], name
            assert found[0, e, 2].item() == pytest.approx(0, abs=0.01 * signal), name


def with_answers(directory: Path, out: Path, answers: dict[str, str]) -> Path:
    """The model with other questions to evaluate: {prompt: answer}."""
    shutil.copytree(directory, out)
    rows = [json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in answers.items()]
    (out / "data" / "eval.jsonl").write_text("".join(rows))
    return out


def usual_answer(policy: policies.Policy, text: str) -> str:
    responses = policies.sample(policy, [ask(policy, text, "")], 200, np.random.default_rng(0))[0]
    texts = policy.tokenizer.batch_decode(responses, skip_special_tokens=True)
    found = [match[1] for match in (re.search(r";(\d+)$", text) for text in texts) if match]
    return max(found, key=found.count)


def run_variance(*arguments: str) -> None:
    """As from the command line, in this process: importing transformers takes seconds."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["variance.py", *arguments])
        try:
            variance.main()
        finally:
            torch.set_num_threads(threads)


def test_variance_writes_a_table_and_a_figure(tiny_directory, policy, tmp_path):
    prompts = ["21+34=", "48+76=", "11+22=", "103+45="]
    answers = {prompt: usual_answer(policy, prompt) for prompt in prompts}
    model = with_answers(tiny_directory, tmp_path / "model", answers)
    command = [sys.executable, str(BENCHMARKS / "variance.py"), "--quick"]
    arguments = ["--model", str(model), "--out", str(tmp_path)]
    subprocess.run([*command, *arguments], check=True, capture_output=True)
    text = (tmp_path / "benchmarks" / "results" / "variance.md").read_text()
    sections = text.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == ["Start", "After 2 steps"]
    for section in sections:
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
        main = {row[0].removeprefix("| "): row[1:] for row in rows[2:10]}
        assert main["none"][0] == "100 [100, 100]"
        # In groups of G, the variance of the mean baseline is (1 - 1/G)^2 that of rloo, exactly.
        mean, rloo = (
            int(re.match(r"\d+", main[name][0])[0])
            for name in ("mean (`dr_grpo`)", "leave-one-out mean (`rloo`)")
        )
        assert mean == pytest.approx(rloo * (7 / 8) ** 2, abs=1)
        assert "nan" not in section
        assert "the sum is even" in section and "share of right answers" in section
    figure = (tmp_path / "docs" / "images" / "variance.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and len(figure) > 10_000


def test_equal_rewards_are_an_error(tiny_directory, tmp_path):
    model = with_answers(tiny_directory, tmp_path / "model", {"21+34=": "never"})
    with pytest.raises(SystemExit, match="at the stage `start`, all answers to each question"):
        run_variance("--quick", "--model", str(model), "--out", str(tmp_path))


def test_quick_results_do_not_replace_full_ones(tiny_directory):
    with pytest.raises(SystemExit, match="--quick would replace the full results; give it an"):
        run_variance("--quick", "--model", str(tiny_directory))


def test_a_missing_model_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"nowhere is not a model; make it with .*nowhere"):
        run_variance("--model", str(tmp_path / "nowhere"))


def test_conversions_are_timed_and_leave_nothing(tmp_path, monkeypatch, capsys):
    tiny = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 160}
    monkeypatch.setattr(convert, "CONFIG", convert.CONFIG | tiny)
    out = tmp_path / "table.md"
    arguments = ["--gigabytes", "0.001", "--rounds", "2", "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["convert.py", *arguments, "--out", str(out)])
    exit_code = convert.main()
    assert list(tmp_path.iterdir()) == [out]
    text = out.read_text()
    assert capsys.readouterr().out == text + "\n"
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    to, back = "Hugging Face -> Megatron", "Megatron -> Hugging Face"
    copies = ["cp", "shutil.copyfile"]
    timed = ["what", *copies, "Hugging Face, read and saved", to, back]
    bars = ["bar", f"{to}: takes, in times of cp", f"{back}: takes, in times of cp"]
    assert [row.removeprefix("| ") for row in rows] == timed + bars
    assert exit_code == (1 if "MISSED" in text else 0)


def test_the_bar_of_conversions_is_a_ratio_of_medians():
    found = {
        "cp": [(1.0, 0.0), (2.0, 0.0), (9.0, 0.0)],
        convert.HF_TO_MEGATRON: [(3.0, 50.0), (2.9, 70.0), (30.0, 60.0)],
        convert.MEGATRON_TO_HF: [(3.1, 5.0), (3.1, 5.0), (0.1, 5.0)],
    }
    text, met = convert.table(found, gigabytes=4.0)
    assert not met
    assert "| 3.00 | 1.33 | 1.50 | 70 | 3.00, 2.90, 30.00 |" in text
    assert "takes, in times of cp | <= 1.5 | 1.50 | met |" in text
    assert "takes, in times of cp | <= 1.5 | 1.55 | MISSED |" in text
    assert convert.table(found | {convert.MEGATRON_TO_HF: [(3.0, 5.0)]}, gigabytes=4.0)[1]


def test_another_model_after_the_way_to_megatron_and_back_is_no_result(tmp_path):
    for name, content in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(content)
    convert.check_equal(tmp_path / "a", tmp_path / "a")
    with pytest.raises(SystemExit, match=r"\['model\.safetensors'\] differ"):
        convert.check_equal(tmp_path / "a", tmp_path / "b")


def test_the_clients_own_time_is_that_of_sampling_real_servers(qwen_pool):
    rollout, version = qwen_pool.rollout(), qwen_pool.next_version()
    rollout.sync(iter(qwen_pool.weights().items()), version)
    one = rollout_client.sample_round(rollout, version, requests=5, samples=3, tokens=4)
    assert (one.requests, one.tokens) == (5, rollout.stats.response_tokens)
    assert 5 * 3 <= one.tokens <= 5 * 3 * 4
    assert 0 < one.cpu_seconds < one.seconds


def test_what_a_request_costs_is_a_median():
    rounds = [rollout_client.Round(10, 500, seconds, 2 * seconds) for seconds in (0.02, 0.01, 0.09)]
    last = rollout_client.table({32: rounds}, samples=8).splitlines()[-1]
    assert last == "| 32 | 2.00 | 40.00 | 250.0 | 12,500 |"
