"""Verifiers against exact arithmetic and reasoning-gym; the pool against real misbehaviour."""

import dataclasses
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.batch import Group, Prompt, Sample
from megatron_opo.errors import RewardError
from megatron_opo.recipe import RewardConfig
from megatron_opo.rewards.pool import RewardPool
from megatron_opo.rewards.verifiers import exact, last_number, numeric, reasoning_gym

PATIENCE_MS = 20_000

FUNCTIONS = """
import asyncio, math, os, signal, subprocess, sys, time
from fractions import Fraction
import numpy

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def compute_score(data_source, solution_str, ground_truth, extra_info, fifo=None):
    action, _, rest = solution_str.partition(" ")
    if action == "length":
        return len(rest)
    if action == "hang":
        print("hanging")
        if fifo:
            with open(fifo, "w") as out:
                subprocess.Popen(["sleep", "1000"], stdout=out)
                out.write("x")
                out.flush()
                time.sleep(1000)
        while True:
            pass
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "exit":
        os._exit(3)
    if action == "segfault":
        import ctypes
        ctypes.string_at(0)
    if action == "sys.exit":
        sys.exit("enough")
    if action == "raise":
        raise KeyError("missing")
    if action == "mute":
        raise Mute
    if action == "alarm":
        from math_verify.utils import timeout
        timeout(1)(time.sleep)(1000)
    if action == "info":
        return {"score": True, "pid": os.getpid(), "torch": "torch" in sys.modules,
                "arguments": [data_source, ground_truth, extra_info], "n": numpy.int64(3),
                "odd": {1}}
    return eval(rest) if action == "return" else float(solution_str == ground_truth)

async def judge(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    if solution_str == "hang":
        await asyncio.sleep(1000)
    if solution_str == "raise":
        raise ValueError("no judge")
    return {"score": len(solution_str), "loop": id(asyncio.get_running_loop())}
"""


def group(texts: list[str], ground_truth="42", key="e0-1", extra_info=None) -> Group:
    prompt = Prompt(key, (1, 2), "question", "source", ground_truth, extra_info or {})
    samples = (
        Sample(key, i, (7, i), (-0.5, -0.1), (3, 3), "stop", text) for i, text in enumerate(texts)
    )
    return Group(prompt, tuple(samples))


def unscored(sample: Sample) -> Sample:
    return dataclasses.replace(sample, reward=None, reward_info={}, reward_error=None)


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(scope="module")
def pool(functions, tmp_path_factory):
    config = RewardConfig(function=f"{functions}:compute_score", timeout_s=20)
    with RewardPool(config, tmp_path_factory.mktemp("logs") / "rewards.log") as pool:
        pool.wait_ready()
        yield pool


@contextmanager
def started(function: str, **config):
    with (
        TemporaryDirectory() as logs,
        RewardPool(
            RewardConfig(function=function, **{"workers": 1, **config}), Path(logs) / "rewards.log"
        ) as pool,
    ):
        pool.wait_ready()
        yield pool


def score(pool: RewardPool, groups, on_sample=None):
    with pool.scoring() as scoring:
        for one in groups:
            scoring.add(one)
        return scoring.results(groups, on_sample)


def scores(pool: RewardPool, texts: list[str], ground_truth="42", **kwargs) -> list:
    (scored,) = score(pool, [group(texts, ground_truth, **kwargs)])
    return [s.reward for s in scored.samples]


# Verifiers.


def test_exact_compares_text_or_what_a_pattern_extracts():
    assert exact("", " 42\n", "42", {}) == 1.0
    assert exact("", "42.", 42, {}) == 0.0
    boxed = r"\\boxed\{(.*?)\}"
    assert exact("", r"first \boxed{1}, no: \boxed{ 42 }", "42", {}, extract=boxed) == 1.0
    assert exact("", r"first \boxed{42}, no: \boxed{1}", "42", {}, extract=boxed) == 0.0
    assert exact("", "42", "42", {}, extract=boxed) == 0.0
    assert exact("", "x", "", {}, extract="x(y)?") == 1.0  # a group that took no part is empty
    with pytest.raises(ValueError, match=r"must be text, got \['42'\]"):
        exact("", "42", ["42"], {})


def _integer(value: int) -> list[str]:
    return [f"{value}", f"{value:,}", f"{value}.0", f"{value:,}.00"]


def spellings(value: Fraction) -> list[str]:
    """Ways to write the number, each of which means exactly it."""
    n, d = value.numerator, value.denominator
    forms = [f"{n}/{d}", f"{n} / {d}", f"{2 * n}/{2 * d}", f"-\\frac{{{-n}}}{{{d}}}"]
    forms = forms if n < 0 else [*forms[:3], f"\\dfrac{{{n}}}{{{d}}}", f"+{n}/{d}"]
    if d == 1:
        forms += _integer(n)
    if set(_prime_factors(d)) <= {2, 5}:
        forms.append(f"{Decimal(n) / Decimal(d):f}")
    return forms + [f.replace("-", "\u2212") for f in forms if f.startswith("-")]


def _prime_factors(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if n % p == 0 and all(p % q for q in range(2, p))]


NUMBERS = st.builds(
    Fraction, st.integers(-3_000_000, 3_000_000), st.sampled_from([1, 1, 2, 3, 7, 8, 25, 40])
)


@given(NUMBERS, NUMBERS, st.data())
@settings(max_examples=300, deadline=None)
def test_numeric_is_exact_in_every_spelling(value, other, data):
    before = data.draw(st.sampled_from(["", "1+1 is 3. ", "12, 13 and ", "step 2:\n\nx=", "$"]))
    after = data.draw(st.sampled_from(["", ".", "!", "$", " apples", "}", "%", "\n", ", done"]))
    spelling = data.draw(st.sampled_from(spellings(value)))
    response = before + spelling + after
    assert last_number(response) == value
    assert numeric("", response, str(other), {}) == float(value == other)
    assert numeric("", str(other), spelling, {}) == float(value == other)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10-5", 5),
        ("10 - 5", 5),
        ("f(x)-5", 5),
        ("[-1,-2]", -2),
        ("1,23", 23),
        ("1,2345", 2345),
        ("1{,}234", 1234),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("1.2.3", 3),
        ("1/2.5", Fraction(5, 2)),
        ("6/2=3", 3),
        ("#### 72", 72),
        ("1/0", None),
        ("9" * 5000, None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_at_the_edges(text, value):
    assert last_number(text) == value


@given(st.text() | st.text("0123456789,.-+/eE \\frac{}$", max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_response_makes_numeric_raise(response):
    assert numeric("", response, "42", {}) in (0.0, 1.0)


def test_numeric_wants_a_number_as_ground_truth():
    with pytest.raises(ValueError, match="no number: 'forty'"):
        numeric("", "42", "forty", {})


def test_math_in_a_worker():
    judged = {
        "\\frac{1}{2}": ({"0.5", "$\\frac{2}{4}$", "so it is \\boxed{1/2}"}, {"$\\frac{1}{3}$"}),
        "$x+1$": ({"$1+x$", "\\boxed{x + 1}"}, {"$x-1$", "x"}),
        "\\boxed{\\{1,2\\}}": ({"$\\{2,1\\}$"}, {"$\\{1,3\\}$"}),
        "(1,2]": ({"$(1,2]$"}, {"$[1,2]$"}),
        "2\\sqrt{3}": ({"$\\sqrt{12}$"}, {"$\\sqrt{13}$", "", "no idea", "$\\frac{1$", "{" * 99}),
        "7": ({"The answer is 7."}, {"The answer is 8."}),
        "": (set(), set()),
    }
    groups = [group([*right, *wrong, "last"], truth) for truth, (right, wrong) in judged.items()]
    with started("math") as pool:
        *scored, unreadable = score(pool, groups)
    for judged_group, (right, _) in zip(scored, judged.values(), strict=False):
        for sample in judged_group.samples:
            expected = float(sample.text in right)
            assert (sample.text, sample.reward) == (sample.text, expected), judged_group.prompt
    assert unreadable.samples[0].reward is None
    assert "cannot read the ground truth ''" in unreadable.samples[0].reward_error


def test_math_refuses_a_thread_where_its_time_limit_would_not_work():
    from concurrent.futures import ThreadPoolExecutor

    from megatron_opo.rewards.verifiers import math

    with ThreadPoolExecutor(1) as executor:
        error = executor.submit(math, "", "1", "1", {}).exception()
    assert isinstance(error, RuntimeError)
    assert "main thread" in str(error)


TASKS = ("chain_sum", "arc_agi", "word_ladder", "isomorphic_strings")


def test_reasoning_gym_scores_its_own_answers_whatever_the_hash_seed(monkeypatch):
    """Among the tasks are some whose entries hold tuples, and some that follow the hash seed."""
    from megatron_opo.procedural import generate

    monkeypatch.setenv("PYTHONHASHSEED", "7")
    groups = []
    for task in TASKS:
        info = {"task": task, "size": 3, "seed": 5, "config": {}}
        for index, (_, answer) in enumerate(generate(task, 3, 5, {})):
            texts = [answer, f"I think\n<answer>{answer}</answer>", "<answer>?</answer>"]
            groups.append(group(texts, answer, f"e0-{index}", {**info, "index": index}))
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    with started("reasoning_gym", timeout_s=60) as pool:
        scored = score(pool, groups)
    for one in scored:
        right, tagged, wrong = one.samples
        assert (right.reward, tagged.reward) == (1.0, 1.0), (one.prompt, right, tagged)
        assert wrong.reward < 0.1


def test_reasoning_gym_extracts_with_a_pattern_and_survives_its_scorers():
    chain = {"task": "chain_sum", "size": 1, "seed": 0, "config": {"max_digits": 1}, "index": 0}
    assert reasoning_gym("", "so it is -13", "-13", chain, extract=r"-?\d+") == 1.0
    assert reasoning_gym("", "so it is", "-13", chain, extract=r"-?\d+") == 0.0
    with pytest.raises(ValueError, match=r"has the answer '-13' here, but '-12' in the dataset"):
        reasoning_gym("", "-12", "-12", chain)
    with pytest.raises(ValueError, match="only questions of a procedural dataset"):
        reasoning_gym("gsm8k", "1", "1", {"split": "train"})

    import reasoning_gym as library

    primes = library.create_dataset("prime_factorization", size=1, seed=0)
    with pytest.raises(ValueError):
        primes.score_answer("foo", primes[0])
    info = {"task": "prime_factorization", "size": 1, "seed": 0, "config": {}, "index": 0}
    result = reasoning_gym("", "foo", primes[0]["answer"], info)
    assert result["score"] == 0.0
    assert result["scorer_error"].startswith("ValueError: ")


# The pool.


def test_each_misbehaviour_costs_its_own_sample_only(functions, monkeypatch):
    outcomes = {
        "42": (1.0, None),
        "hang": (None, "no result within 1 s"),
        "41": (0.0, None),
        "stop": (None, "no result within 1 s"),
        "exit": (None, "the worker exited with code 3"),
        "segfault": (None, "the worker was killed by signal 11 (Segmentation fault)"),
        "return 1": (1.0, None),
        "sys.exit": (None, "SystemExit: enough (line "),
        "raise": (None, "KeyError: 'missing' (line "),
        "mute": (None, "Mute: (its message cannot be shown) (line "),
        "return math.nan": (None, "ValueError: returned nan, must be finite"),
        "return -math.inf": (None, "ValueError: returned -inf, must be finite"),
        "return 10**400": (None, "OverflowError: "),
        "return None": (None, "TypeError: returned NoneType None, must be a number"),
        "return '1.0'": (None, "TypeError: returned str '1.0', must be a number"),
        "return {'acc': 1}": (None, "TypeError: the returned dict has no `score`, its keys: ['a"),
        "return {'score': None}": (None, "TypeError: returned NoneType None, must be"),
        "return os.closerange(3, 99) or time.sleep(99)": (None, "the worker closed its connectio"),
        "return True": (1.0, None),
        "return Fraction(1, 4)": (0.25, None),
        "return numpy.float32(0.5)": (0.5, None),
        "return numpy.bool_(True)": (1.0, None),
        "return numpy.array(0.75)": (0.75, None),
        "return {'score': -2}": (-2.0, None),
        "return len(bytearray(3 * 10**9))": (None, "MemoryError (line "),
        "return {'score': 1, 'text': 'x' * 2**20}": (None, "ValueError: returned 1,048,6"),
        "return bool(os.environ.get('MEGATRON_OPO_API_KEY'))": (0.0, None),
    }
    original = group(list(outcomes))
    done = []
    config = {"timeout_s": 1.0, "workers": 2, "memory_gb": 2}
    monkeypatch.setenv("MEGATRON_OPO_API_KEY", "k")
    with started(f"{functions}:compute_score", **config) as pool:
        (scored,) = score(pool, [original], on_sample=done.append)
    for sample, (reward, reason) in zip(scored.samples, outcomes.values(), strict=True):
        assert sample.reward == reward, sample
        assert (sample.reward_error or "").startswith(reason or ""), sample
        assert (sample.reward is None) == (sample.reward_error is not None)
    assert [unscored(s) for s in scored.samples] == list(original.samples)
    assert scored.prompt == original.prompt
    assert sorted(done, key=lambda s: s.index) == list(scored.samples)


def test_a_worker_that_somebody_kills_costs_no_sample(functions, tmp_path):
    mark = tmp_path / "killed"
    once = f"(open('{mark}', 'w').close(), os.kill(os.getpid(), 9))"
    with started(f"{functions}:compute_score") as pool:
        assert scores(pool, [f"return 1 if os.path.exists('{mark}') else {once}", "42"]) == [1, 1]


def test_what_a_function_prints_is_shown_up_to_a_limit(functions, tmp_path, capfd):
    loud = "return print('loud') or 1"
    flood = "return print('x' * 2**21) or 1"
    kill = "return os.kill(os.getpid(), 9)"
    path = tmp_path / "logs" / "rewards.log"
    config = RewardConfig(function=f"{functions}:compute_score", workers=1)
    with RewardPool(config, path) as pool:
        # A worker that replaces another has what that one left.
        assert scores(pool, [loud, flood, kill, loud, flood]) == [1.0, 1.0, None, 1.0, 1.0]
    shown = ""
    while "(dropped: reward.function printed over 1,048,576 bytes)" not in shown:
        shown = path.read_text()
    assert shown.startswith("loud\n") and shown.count("dropped") == 1
    assert shown.count("x") == 2**20 - len("loud\n")
    assert not capfd.readouterr().err


@given(st.lists(st.lists(st.text(), min_size=2, max_size=5), max_size=6))
@settings(max_examples=40, deadline=None)
def test_every_sample_gets_the_reward_of_its_own_text(pool, texts):
    groups = [group([f"length {t}" for t in ts], key=f"e0-{i}") for i, ts in enumerate(texts)]
    scored = score(pool, groups)
    assert [[s.reward for s in g.samples] for g in scored] == [[len(t) for t in ts] for ts in texts]
    assert [g.prompt for g in scored] == [g.prompt for g in groups]
    assert [[unscored(s) for s in g.samples] for g in scored] == [list(g.samples) for g in groups]


def test_arguments_and_info_cross_unchanged_and_workers_stay_light(pool):
    extra = {"index": 3, "nested": [{"a": None}], "text": "\u00e4\ud800"}
    (scored,) = score(pool, [group(["info"], ["4", 2.5, True], extra_info=extra)])
    (sample,) = scored.samples
    assert sample.reward == 1.0
    assert sample.reward_info["arguments"] == ["source", ["4", 2.5, True], extra]
    assert sample.reward_info["n"] == 3
    assert sample.reward_info["odd"] == "{1}"
    assert sample.reward_info["torch"] is False
    assert sample.reward_info["pid"] != os.getpid()


def test_a_response_larger_than_any_buffer(pool):
    assert scores(pool, ["length " + "x" * 5_000_000]) == [5_000_000.0]


def test_math_verifys_alarm_ends_a_sample_without_costing_the_worker(functions):
    with started(f"{functions}:compute_score", timeout_s=30) as pool:
        (scored,) = score(pool, [group(["info", "alarm", "info"])])
    before, late, after = scored.samples
    assert late.reward_error.startswith("TimeoutException: Operation timed out!")
    assert before.reward_info["pid"] == after.reward_info["pid"]


def test_an_async_function_runs_in_one_loop(functions):
    with started(f"{functions}:judge", timeout_s=1) as pool:
        (scored,) = score(pool, [group(["1234", "raise", "12", "hang", "123"])])
    assert [s.reward for s in scored.samples] == [4.0, None, 2.0, None, 3.0]
    assert scored.samples[1].reward_error.startswith("ValueError: no judge")
    assert scored.samples[3].reward_error == "no result within 1 s"
    assert scored.samples[0].reward_info["loop"] == scored.samples[2].reward_info["loop"]


def test_keyword_arguments_of_the_recipe(functions):
    with started("exact", kwargs={"extract": "[0-9]+"}) as pool:
        assert scores(pool, ["it is 42.", "it is 41."]) == [1.0, 0.0]


def test_a_callback_that_fails_leaves_the_pool_usable(pool):
    def fail(sample):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(pool, [group(["42"] * 50)], on_sample=fail)
    assert scores(pool, ["41", "42"]) == [0.0, 1.0]


LOAD_ERRORS = {
    "exat": "no verifier is called `exat`; did you mean `exact`? allowed: exact, numeric, math",
    "{dir}/absent.py:f": "{dir}/absent.py is not a file",
    "{dir}/text.txt:f": "must be path/to/file.py:function",
    "{dir}/good.py:": "must be path/to/file.py:function",
    "{dir}/good.py:compute_scor": "did you mean `compute_score`?); functions in it: compute_score",
    "{dir}/good.py:CONSTANT": "has no function `CONSTANT`; functions in it: compute_score, helper",
    "{dir}/good.py:helper": "is defined as (x) and cannot be called with the keyword arguments",
    "{dir}/syntax.py:f": "cannot be imported: SyntaxError: ",
    "{dir}/imports.py:f": "ModuleNotFoundError: No module named 'not_there' (line 2 of imports.py)",
    "{dir}/exits.py:f": "cannot be imported: SystemExit: 4",
    "{dir}/dies.py:f": "while loading it the worker exited with code 5",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("broken")
    files = {
        "text.txt": "",
        "good.py": "CONSTANT = 1\ndef compute_score(data_source, solution_str, ground_truth, "
        "extra_info):\n    return 1\ndef helper(x):\n    return x\n",
        "syntax.py": "def f(:\n",
        "imports.py": "\nimport not_there\n",
        "exits.py": "import sys\nsys.exit(4)\n",
        "dies.py": "import os\nos._exit(5)\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize("function", LOAD_ERRORS)
def test_a_function_that_cannot_be_loaded(function, broken):
    with pytest.raises(RewardError) as caught, started(function.format(dir=broken)):
        pass
    assert str(caught.value).startswith("reward.function")
    assert LOAD_ERRORS[function].format(dir=broken) in str(caught.value)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("numeric", {"extract": "x"}, "got an unexpected keyword argument 'extract'"),
        ("exact", {"extract": "("}, "fails with reward.kwargs (extract): "),
    ],
)
def test_keyword_arguments_that_do_not_fit(function, kwargs, message):
    with pytest.raises(RewardError) as caught, started(function, kwargs=kwargs):
        pass
    assert message in str(caught.value)


def test_a_function_that_loads_only_once_ends_the_scoring_loudly(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        "import os\n"
        f"MARK = {str(tmp_path / 'mark')!r}\n"
        "if os.path.exists(MARK):\n    raise ImportError('gone')\n"
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    open(MARK, 'w').close()\n    os._exit(1)\n"
    )
    with started(f"{path}:f") as pool:
        with pytest.raises(RewardError, match="cannot be imported: ImportError: gone"):
            score(pool, [group(["a", "b", "c"])])
        with pytest.raises(RewardError, match="ImportError: gone"):
            score(pool, [group(["d"])])


@contextmanager
def fifo(path: Path):
    """The reading end of a new named pipe."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def wait_for(descriptor: int, event: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return any(seen & event for _, seen in poll.poll(PATIENCE_MS))


def test_a_killed_worker_takes_the_processes_it_started_with_it(functions, tmp_path):
    kwargs = {"fifo": str(tmp_path / "pipe")}
    with (
        fifo(tmp_path / "pipe") as pipe,
        started(f"{functions}:compute_score", kwargs=kwargs, timeout_s=1) as pool,
    ):
        assert scores(pool, ["hang", "42"]) == [None, 1.0]
        assert os.read(pipe, 9) == b"x"
        assert wait_for(pipe, select.POLLHUP), "the function's own child still lives"


def test_closing_ends_what_is_running_and_waiting(functions, tmp_path):
    kwargs = {"fifo": str(tmp_path / "pipe")}
    hanging = group(["hang"] * 3)
    with (
        fifo(tmp_path / "pipe") as pipe,
        started(f"{functions}:compute_score", kwargs=kwargs, timeout_s=1000) as pool,
    ):
        futures = [pool.score_one(hanging.prompt, s) for s in hanging.samples]
        assert wait_for(pipe, select.POLLIN)
        pool.close()
        for future in futures:
            assert isinstance(future.exception(), RewardError)
        assert os.read(pipe, 9) == b"x"
        assert wait_for(pipe, select.POLLHUP), "a worker outlived the pool"
        with pytest.raises(RuntimeError, match="closed"):
            score(pool, [hanging])


TRAINER = """
import sys
from pathlib import Path
from megatron_opo.batch import Prompt, Sample
from megatron_opo.recipe import RewardConfig
from megatron_opo.rewards.pool import RewardPool
config = RewardConfig(function=sys.argv[1], kwargs={"fifo": sys.argv[2]}, timeout_s=1000)
sample = Sample("e0-1", 0, (1,), (0.0,), (0,), "stop", sys.argv[3])
with RewardPool(config, Path(sys.argv[2]).with_name("rewards.log")) as pool:
    pool.score_one(Prompt("e0-1", (1,), "", "", "", {}), sample).result()
"""


def test_no_worker_outlives_a_trainer_that_is_killed(tmp_path):
    path = tmp_path / "spin.py"
    path.write_text(
        "def f(data_source, solution_str, ground_truth, extra_info, fifo):\n"
        "    out = open(fifo, 'w')\n    out.write('x')\n    out.flush()\n"
        "    while True:\n        pass\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    with fifo(tmp_path / "pipe") as pipe:
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, f"{path}:f", str(tmp_path / "pipe"), ""],
            env={**os.environ, "PYTHONPATH": root},
        )
        try:
            assert wait_for(pipe, select.POLLIN)
            assert os.read(pipe, 9) == b"x"
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        assert wait_for(pipe, select.POLLHUP), "a worker outlived the trainer"
