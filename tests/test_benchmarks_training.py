"""The benchmarks of training: what they compute is right, and what they report is what they saw."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, which import one another

import attention  # noqa: E402
import logprobs  # noqa: E402
import step  # noqa: E402
import sync  # noqa: E402
import training_runs  # noqa: E402
import versus_task  # noqa: E402
import versus_trl as versus  # noqa: E402
from process_tree import Usage, Watch  # noqa: E402


def run_main(module, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    return module.main()


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("task")
    assert 1_000_000 < training_runs.make_task(directory) < 1_100_000
    return directory


def test_no_response_ends_early_and_each_token_is_a_word(task):
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()[:4]]
    ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    assert ids.shape == (4, versus_task.PROMPT_WORDS)
    with torch.no_grad():
        probabilities = model(input_ids=ids).logits.softmax(-1)
    assert probabilities[..., :2].max() < 1e-10
    entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum(-1)
    assert entropy.min() > 7  # of at most log 2048 = 7.6
    text = tokenizer.decode([2, 3, 2047], skip_special_tokens=True)
    assert text.split() == ["w0", "w1", "w2045"]
    assert versus_task.score(text) == versus_task.compute_score("", text, "") == 1 / 3


def test_both_sides_take_one_step_on_the_same_batch(task, tmp_path):
    from megatron_opo.recipe_file import load_recipe

    training_runs.write_recipe(
        tmp_path / "r.yaml", task, prompts=32, samples=8, length=64, steps=5, lr=1e-3
    )
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt == 256
    for tuned in (True, False):
        config = versus.trl_config(64, 5, tuned)
        micro_batches = config["gradient_accumulation_steps"]
        assert config["per_device_train_batch_size"] * micro_batches == 256
        assert config["num_generations"] == recipe.rollout.samples_per_prompt
        assert config["max_completion_length"] == recipe.rollout.max_response_tokens


def step_of(seconds: float, **phases: float) -> training_runs.Step:
    return training_runs.Step(seconds, phases, length=2.0, reward=0.5, grad_norm=0.1)


def run_of(*seconds: float, scored=(("w1 w2", 0.5),)) -> versus.Run:
    return versus.Run([step_of(s) for s in seconds], list(scored), 3 * 10**9, [1.5])


def test_the_bar_against_trl_is_a_ratio_of_medians_of_what_counts():
    ours, theirs = run_of(99, 99, 1, 2, 3), run_of(0.1, 0.1, 9, 10, 50)
    runs = {versus.OURS: [ours], versus.THEIRS: [theirs, run_of(0.1, 0.1, 10)]}
    lines, met = versus.verdict(runs)
    assert met and lines[0].endswith("5.00, met.")
    assert "| megatron_opo | 128 | 2.00 | 1.50 | 3.00 |" in "\n".join(versus.table(runs))
    runs[versus.THEIRS] = [run_of(0.1, 0.1, 9.98)]
    lines, met = versus.verdict(runs)
    assert not met and lines[0].endswith("4.99, MISSED.")


def test_what_is_not_the_same_task_is_no_result():
    versus.check("TRL", run_of(1), length=2)
    with pytest.raises(SystemExit, match="mean lengths"):
        versus.check("TRL", run_of(1), length=3)
    with pytest.raises(SystemExit, match=r"reward 0\.5 for 'w1 w3', should be 0\.0"):
        versus.check("TRL", run_of(1, scored=[("w1 w3", 0.5)]), length=2)


def test_steps_are_read_from_the_run(tmp_path):
    def record(number: int, elapsed: float, **timing: float) -> str:
        metrics = {"critic/rewards/mean": 0.5, "response_length/mean": 2, "actor/grad_norm": 0.1}
        timing = {f"timing_s/{name}": value for name, value in timing.items()}
        head = {"step": number, "kind": "train", "elapsed_s": elapsed}
        return json.dumps(head | metrics | timing) + "\n"

    first = record(1, 10.0, step=4.0, generate=1.0, update=2.5)
    between = json.dumps({"step": 1, "kind": "eval", "elapsed_s": 11.0}) + "\n"
    second = record(2, 16.0, step=5.0, generate=2.0, **{"update": 3.0, "update/forward": 1.0})
    (tmp_path / "metrics.jsonl").write_text(first + between + second)
    steps = training_runs.read_metrics(tmp_path)
    assert steps == [step_of(4.0, generate=1.0, update=2.5), step_of(6.0, generate=2.0, update=3.0)]
    assert training_runs.median_phases(steps) == {"generate": 1.5, "update": 2.75, "rest": 0.75}
    text = step.table({step.CASES[0]: steps})
    assert "12,288 | 5.00 | 2,458 | 1.50 | 2.75 | 0.75 |" in text


WORK = """
import subprocess, sys, time
inner = "x = bytearray(80_000_000)\\nwhile __import__('time').process_time() < 0.5: pass\\n"
for _ in range(2):
    subprocess.run([sys.executable, "-c", inner], check=True)
    with open(sys.argv[1], "a") as file:
        file.write("done\\n")
time.sleep(0.3)
"""


def test_usage_is_that_of_all_processes(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path / "lines")])
    with Watch(process.pid, tmp_path / "lines") as usage:
        assert process.wait() == 0
    assert isinstance(usage, Usage)
    assert 80e6 < usage.peak_bytes < 160e6  # the second process came when the first was gone
    assert 0.6 < usage.cpu_seconds < 2
    assert len(usage.marks) == 2
    assert usage.marks[1][1] - usage.marks[0][1] > 0.3


def test_memory_of_logprobs_is_what_the_tensors_have(monkeypatch, capsys):
    tokens, vocabulary = 600, 3000
    monkeypatch.setattr(logprobs, "CHUNK", 100)
    code = run_main(
        logprobs, monkeypatch, f"--tokens={tokens}", f"--vocabulary={vocabulary}", "--rounds=1"
    )
    assert code == 0  # fewer than 8 chunks: no bar
    rows = re.findall(r"^\| (\w[^|]*) \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out, re.M)
    assert [name for name, *_ in rows] == list(logprobs.CONTENDERS)
    inputs = logprobs.make_inputs(tokens, vocabulary, "cpu")
    peaks = {name: peak for name, (_, peak) in logprobs.measure(inputs, 1).items()}
    logits = 4 * tokens * vocabulary
    # Logits, their log_softmax and the gradient of one of them; gradients of the weight beside.
    weight = 4 * vocabulary * logprobs.HIDDEN
    assert 2 * logits < peaks[logprobs.PLAIN] < 3 * logits + 2 * weight
    # Of a chunk, a sixth of the tokens, at most twice the logits exist.
    assert logits / 6 < peaks[logprobs.OURS] < 2 * logits / 6 + 3 * weight


def test_attention_is_timed_once_it_is_right(monkeypatch, capsys):
    code = run_main(attention, monkeypatch, "--sequences=2", "--length=8", "--rounds=1")
    text = capsys.readouterr().out
    assert code == (1 if "MISSED" in text else 0)
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.M)] == [2, 8, 32]
    right = attention.loop
    monkeypatch.setitem(attention.CONTENDERS, attention.LOOP, lambda pack: 1.001 * right(pack))
    with pytest.raises(SystemExit, match="off by"):
        attention.check("cpu")


def test_a_mask_over_a_large_pack_is_left_out():
    packs = [attention.make_pack(4, 8, "cpu")]
    wide = replace(packs[0], lengths=[attention.MOST_MASKED + 1])
    found = {(name, i): [1.0] for name in attention.CONTENDERS for i in range(2)}
    del found[attention.MASKED, 1]
    text, met = attention.table([packs[0], wide], found)
    assert met and "| 1 | 8,193 | 1000.0 | 1000.0 | 1000.0 | - |" in text


def test_updates_of_packed_and_padded_rollouts_are_the_same(tmp_path):
    """The benchmark compares their gradients; --quick in a process of its own, as it is a rank."""
    out = tmp_path / "table.md"
    command = [sys.executable, str(BENCHMARKS / "packing.py"), "--quick", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode in (0, 1) and out.exists(), (result.returncode, result.stderr)
    text = out.read_text()
    assert result.returncode == (1 if "MISSED" in text else 0)
    rows = re.findall(r"^\| (packed|padded[^|]*) \| ([\d,]+) \| (\d+)% \|", text, re.M)
    (_, packed, share), (_, padded, padded_share) = rows
    longest = int(re.search(r"lengths [\d, ]+, (\d+);", text)[1]) + versus_task.PROMPT_WORDS
    assert int(padded.replace(",", "")) == 32 * longest > int(packed.replace(",", ""))
    assert int(share) > int(padded_share)


def test_a_sync_is_held_against_the_plain_copy_of_its_transport():
    plain, transports = sync.PLAIN, sync.TRANSPORTS
    seconds = {plain["distributed"]: 1.0, plain["shared_memory"]: 0.35}
    seconds |= {f"sync, {transport}": 0.5 for transport in transports}
    text, met = sync.table({name: [value] for name, value in seconds.items()}, 1.0)
    assert met and "| sync, distributed | 0.50 | 2.00 | 200% |" in text
    assert "| sync, shared_memory | 0.50 | 2.00 | 70% |" in text
    seconds[plain["shared_memory"]] = 0.3
    assert not sync.table({name: [value] for name, value in seconds.items()}, 1.0)[1]


def test_an_update_is_timed(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, str(BENCHMARKS / "update.py"), "--quick", "--micro-batches", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = re.findall(r"\| ([\d.,e-]+) \|$", out.read_text(), re.MULTILINE)
    seconds, rate, _ = (float(number.replace(",", "")) for number in numbers)
    assert rate * seconds == pytest.approx(4 * 256, rel=0.01)
