"""The conversion tools as a user runs them: what they accept, say, verify, and need."""

import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_opo import convert, convert_check
from megatron_opo.checkpoint_source import find_checkpoint
from megatron_opo.convert import (
    DTYPES,
    exit_with,
    hf_to_megatron,
    megatron_to_hf,
    shown_progress,
)
from megatron_opo.convert_check import check_conversion
from megatron_opo.errors import CheckpointError, RecipeError, WeightError
from megatron_opo.model_fit import check_model
from megatron_opo.recipe_file import load_recipe
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import hf_tensors, open_megatron
from megatron_opo.weights.megatron_save import save_megatron
from megatron_opo.weights.save import save_hf
from tests.actor_cases import RECIPE
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
NORM = "model.layers.2.self_attn.k_norm.weight"


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, arguments)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("convert") / "model")


@pytest.fixture(scope="module")
def converted(model) -> Path:
    """By the tool, and found right by it."""
    target = model.with_name("megatron")
    done = run_tool("convert_hf_to_megatron", model, target, "--verify", "--threads", 3)
    assert done.returncode == 0, done.stderr
    assert "46 tensors compared, 0 differ" in done.stdout
    gap = re.search(r"transformers and Megatron differ by (\S+) at most, allowed", done.stdout)
    assert gap is not None
    assert 0 < float(gap[1]) < 1e-4
    assert done.stdout.endswith("verify: the same model\n")
    assert re.search(r"3\.\d MB of 3\.\d MB, \d+ MB/s, 0 s left\n", done.stderr)
    return target


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    """A run directory with a checkpoint, as far as this goes without training."""
    directory = tmp_path_factory.mktemp("run") / "run"
    save_megatron(directory / "checkpoints" / "step_3", model, dtype=torch.bfloat16)
    shutil.rmtree(directory / "checkpoints" / "step_3" / "hf")
    state = {"version": 3, "cursor": {}, "recipe": {"model": {"path": str(model)}}}
    (directory / "checkpoints" / "step_3" / "state.json").write_text(json.dumps(state))
    (directory / "checkpoints" / "step_9").mkdir()  # was not finished
    return directory


def test_there_and_back_is_the_same_directory(model, converted, tmp_path):
    assert to_hf(converted, tmp_path / "back", None) == 0
    left, right = (load_file(d / "model.safetensors") for d in (model, tmp_path / "back"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert {path.name for path in model.iterdir()} == {
        path.name for path in (tmp_path / "back").iterdir()
    }


def test_a_run_is_converted_to_a_chosen_dtype_and_shard_size(model, run, tmp_path):
    target = tmp_path / "hf"
    arguments = ("--dtype", "float32", "--max-shard-gb", "0.001")
    done = run_tool("convert_megatron_to_hf", run, target, *arguments)
    assert done.returncode == 0, done.stderr
    files = list(target.glob("model-*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    stored = load_file(model / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name].bfloat16().float()) for name in stored)
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    step = run / "checkpoints" / "step_3"
    arguments = (str(target), str(step), "float32", "hf", str(model))
    ((problems, said),) = run_ranks(1, verify_on_rank, *arguments)
    assert problems == []
    assert len(said) == 2


def test_an_error_is_one_line_and_code_2(converted, capsys):
    def fail() -> int:
        raise CheckpointError("no such thing; give another")

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such thing; give another\n"


def verify_on_rank(
    hf: str, megatron: str, dtype: str | None, written: str, other_config: str
) -> tuple[list[str], list[str]]:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]  # the tools are a job of their own
    said: list[str] = []
    return check_conversion(
        Path(hf),
        Path(megatron),
        DTYPES[dtype] if dtype else None,
        written,
        Path(other_config),
        said.append,
    ), said


def test_verify_finds_what_was_tampered_with(model, converted, tmp_path):
    tampered = tmp_path / "tampered"
    shutil.copytree(model, tampered)
    tensors = load_file(tampered / "model.safetensors")
    tensors[NORM][3] += 1e-6
    save_file(tensors, tampered / "model.safetensors", metadata={"format": "pt"})
    arguments = (str(tampered), str(converted), None, "hf", str(model))
    ((problems, said),) = run_ranks(1, verify_on_rank, *arguments)
    assert len(problems) == 1
    assert problems[0].startswith(f"{NORM}: 1 of 32 values differ, the first of them ")
    assert said == ["verify: 46 tensors compared, 1 differ"]
    del tensors[NORM]
    save_file(tensors, tampered / "model.safetensors", metadata={"format": "pt"})
    ((problems, said),) = run_ranks(1, verify_on_rank, *arguments)
    assert said == []
    assert f"1 missing: {NORM}" in problems[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}, "rope is .*99"),
        ({"rms_norm_eps": 3e-4}, r"norm_eps is 0\.0003, must be "),
        ({"max_position_embeddings": 77}, "max_positions is 77, must be "),
    ],
)
@pytest.mark.parametrize("written", ["hf", "megatron"])
def test_verify_compares_what_config_json_means(
    written, change, problem, model, converted, tmp_path
):
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | change))
    hf, other = (changed, model) if written == "hf" else (model, changed)
    problems = check_conversion(hf, converted, None, written, other, print)
    assert len(problems) == 1
    assert re.match(rf"config\.json: {problem}", problems[0])


def test_verify_compares_logits_also_where_all_tensors_are_right(model, converted, tmp_path):
    """The other half: a config.json that gives the same weights another meaning."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 99.0
    (other / "config.json").write_text(json.dumps(config))
    ((problems, _),) = run_ranks(1, compare_logits_of_two, str(other), str(model), str(converted))
    assert re.match(r"the logits of the two models differ by \S+ where", problems[0])


def compare_logits_of_two(hf: str, model: str, megatron: str) -> tuple[list[str], list[str]]:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    config = json.loads((Path(model) / "config.json").read_text())
    said: list[str] = []
    return (
        convert_check._compare_logits(Path(hf), Path(megatron), config, None, said.append),
        said,
    )


def too_little_memory(written: str, model: str, megatron: str, target: str) -> int:
    """The exit code where the conversion has enough, and what --verify loads then has not."""

    def scarce(*_):
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        limit = 1024 * int(used[1])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return torch.ones(2**28)

    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    convert_check._transformers_logits = scarce
    os.dup2(os.open(Path(target).with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
    if written == "hf":
        return megatron_to_hf(
            Path(megatron),
            Path(target),
            model=None,
            dtype=None,
            max_shard_bytes=10**9,
            verify=True,
        )
    return hf_to_megatron(Path(model), Path(target), dtype=None, threads=1, verify=True)


@pytest.mark.parametrize("written", ["hf", "megatron"])
def test_too_little_memory_to_verify_is_said_in_a_line(written, model, converted, tmp_path):
    target = tmp_path / "target"
    (code,) = run_ranks(1, too_little_memory, written, str(model), str(converted), str(target))
    assert code == 2
    error = target.with_suffix(".err").read_text().splitlines()[-1]
    assert error.startswith(f"error: {target} is written whole, but not verified: the system gave")
    assert target.is_dir()


def test_an_error_nobody_thought_of_is_no_difference(capsys):
    def fail() -> int:
        raise KeyError("odd")

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    assert ended.value.code == 3
    assert "KeyError: 'odd'" in capsys.readouterr().err


def test_too_little_memory_to_convert_is_a_line(capsys):
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: len(torch.empty(2**60)))
    assert ended.value.code == 2
    assert re.fullmatch("error: the system gave too little .*\n", capsys.readouterr().err)


def test_what_a_terminal_would_act_on_is_escaped(capsys):
    def fail() -> int:
        raise CheckpointError("\x1b[2J \ud800 \u00e4 is there;\ngive another")

    with pytest.raises(SystemExit):
        exit_with(fail)
    assert capsys.readouterr().err == "error: \\x1b[2J \\ud800 \u00e4 is there;\n  give another\n"


# Sends itself Ctrl-C when a module is imported (with nothing else running), or a line is printed.
INTERRUPTED_TOOL = """
import builtins, os, runpy, signal, sys

when, tool = sys.argv[1], sys.argv[2]
sys.argv = sys.argv[2:]
original_import, original_print = builtins.__import__, builtins.print

def watched_import(name, *arguments, **how):
    if name == when:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pass  # as a library may
    return original_import(name, *arguments, **how)

builtins.__import__ = watched_import
runpy.run_path(tool, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("when", "message"),
    [("torch", ""), ("transformers", "interrupted: {} is written whole, but not verified\n")],
)
def test_an_interrupt_is_answered_at_once_and_says_what_is_there(
    when, message, converted, tmp_path
):
    target = tmp_path / "target"
    tool = ROOT / "tools" / "convert_megatron_to_hf.py"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_TOOL, when, tool, converted, target, "--verify"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 130
    lines = [line for line in done.stderr.splitlines(keepends=True) if " MB/s, " not in line]
    assert "".join(lines) == message.format(target)
    assert target.exists() == bool(message)


def test_an_interrupted_conversion_leaves_nothing(converted, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(convert._Lines, "__call__", interrupt)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            exit_with(lambda: to_hf(converted, tmp_path / "hf", None))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted; nothing was left behind\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tool", "option", "values", "message"),
    [
        (
            "convert_megatron_to_hf",
            "--max-shard-gb",
            ["inf", "1e300", "nan", "0", "-1"],
            "must be above 0 and at most 1e+06",
        ),
        ("convert_hf_to_megatron", "--threads", ["0", "-1", "65"], "must be from 1 to 64"),
    ],
)
def test_numbers_out_of_range_are_refused(tool, option, values, message, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    main = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["main"]
    for value in values:
        monkeypatch.setattr(sys, "argv", [tool, "a", "b", f"{option}={value}"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_a_target_that_exists_is_said_before_anything_else(converted, tmp_path):
    for target in (Path("/"), Path("."), Path(""), tmp_path):
        with pytest.raises(CheckpointError, match="exists already"):
            to_hf(tmp_path / "no checkpoint", target, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json, which is a file: name one"):
        to_hf(converted, tmp_path / "hf", tmp_path / "config.json")


def test_every_place_a_checkpoint_may_lie_is_found(model, converted, run, tmp_path):
    step = run / "checkpoints" / "step_3"
    assert find_checkpoint(run).checkpoint == find_checkpoint(step).checkpoint == step
    assert find_checkpoint(run).model == model
    assert find_checkpoint(converted).checkpoint == converted
    assert find_checkpoint(converted).model == converted / "hf"
    for text, name in (("10", "iter_0000010"), ("release\n", "release")):
        root = tmp_path / name
        shutil.copytree(step, root / name, ignore=shutil.ignore_patterns("state.json"))
        (root / "latest_checkpointed_iteration.txt").write_text(text)
        for path in (root, root / name):
            assert find_checkpoint(path).checkpoint == root / name
            assert find_checkpoint(path).model is None
    with pytest.raises(
        CheckpointError, match=r"does not say which model it holds: name .*--hf-con"
    ):
        to_hf(root, tmp_path / "hf", None)
    assert to_hf(root, tmp_path / "hf", model) == 0


def to_hf(path: Path, target: Path, model: Path | None) -> int:
    return megatron_to_hf(
        path, target, model=model, dtype=None, max_shard_bytes=10**10, verify=False
    )


def test_places_without_a_checkpoint_are_refused(model, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "latest_checkpointed_iteration.txt").write_text("../../x")
    shutil.copytree(run, tmp_path / "moved")
    state = tmp_path / "moved" / "checkpoints" / "step_3" / "state.json"
    for path, message in (
        ("absent", "absent is not a directory; give a run directory or"),
        ("empty", r"empty holds no metadata\.json; give"),
        ("begun", "has no complete checkpoint"),
        ("odd", r"holds '../../x'; allowed: a number, or `release`"),
    ):
        with pytest.raises(CheckpointError, match=message):
            find_checkpoint(tmp_path / path)
    state.write_text(state.read_text().replace(str(model), "/gone"))
    with pytest.raises(CheckpointError, match=r"is /gone, which does not exist here: name one"):
        to_hf(tmp_path / "moved", tmp_path / "hf", None)
    for text in ("{", 100_000 * "["):
        state.write_text(text)
        with pytest.raises(CheckpointError, match=r"state\.json cannot be used"):
            to_hf(tmp_path / "moved", tmp_path / "hf", None)


def test_weights_of_several_dtypes_need_a_choice(model, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    tensors = load_file(mixed / "model.safetensors")
    tensors = {n: t if "norm" in n else t.bfloat16() for n, t in tensors.items()}
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    save_megatron(tmp_path / "megatron", mixed)
    with pytest.raises(WeightError, match=r"in bfloat16 and float32: choose one by --dtype"):
        to_hf(tmp_path / "megatron", tmp_path / "hf", None)


def start_training(directory: str, model: str, checkpoint: str, overrides: list[str]) -> dict:
    """On a rank: what the actor holds when training starts."""
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.actor.step import Actor
    from megatron_opo.spmd import Driver
    from megatron_opo.train import load_start
    from megatron_opo.weights.export import export_hf

    path = Path(directory) / f"recipe_{os.environ['RANK']}.yaml"
    path.write_text(RECIPE.format(model=model, run_dir=directory))
    recipe = load_recipe(path, [*overrides, f"model.megatron_checkpoint={checkpoint}"])
    parallel = initialize(recipe.actor, seed=0)
    actor = Actor(recipe, check_model(recipe), parallel, Driver(parallel.rank, parallel.control))
    load_start(actor)
    return dict(export_hf(actor.modules, actor.hf_config, actor.dtype))


def test_training_starts_from_its_weights_in_another_layout(model, run, tmp_path):
    other = tiny_qwen3(tmp_path / "other", seed=1)
    overrides = ["actor.tensor_parallel=2"]
    found = run_ranks(2, start_training, str(tmp_path), str(other), str(run), overrides)[0]
    stored = load_file(model / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name].bfloat16().float()) for name in stored)


def test_a_recipe_whose_model_has_a_config_nested_too_deeply_is_refused(model, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=tmp_path, run_dir=tmp_path))
    (tmp_path / "config.json").write_text(100_000 * '{"a":')
    with pytest.raises(RecipeError, match=r"^model\.path: .*config\.json is not valid JSON"):
        check_model(load_recipe(path, []))


def test_a_recipe_that_names_no_checkpoint_is_refused_at_its_start(model, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, run_dir=tmp_path))
    recipe = load_recipe(path, [f"model.megatron_checkpoint={model}"])
    with pytest.raises(RecipeError, match=r"^model\.megatron_checkpoint: .*holds no metadata"):
        check_model(recipe)


LARGE = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The largest tensor takes 131 MB, and as much may wait to be written. Two more are read meanwhile,
# each beside a chunk of 64 MB that it is made of. The model's 2 GB do not fit.
LIMIT_BYTES = 600 * 2**20


def make_large(directory: Path) -> Path:
    (directory / "config").mkdir()
    (directory / "config" / "config.json").write_text(json.dumps(LARGE))
    pool = torch.randn(2**23, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(9)
    weights = (
        (name, pool[37 * i :][: torch.Size(shape).numel()].reshape(shape))
        for i, (name, shape) in enumerate(read_architecture(LARGE).hf_shapes().items())
    )
    save_hf(directory / "hf", weights, source=directory / "config")
    return directory / "hf"


def convert_in_little_memory(root: str, limit_bytes: int) -> tuple[str, bool]:
    """Both ways under the limit; what holding all weights at once gives, and are they the same."""
    hf, megatron, back = (Path(root) / name for name in ("hf", "megatron", "back"))
    used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert used is not None
    limit = 1024 * int(used[1]) + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    save_megatron(megatron, hf)
    assert to_hf(megatron, back, None) == 0
    files = [directory / "model.safetensors" for directory in (hf, back)]
    same = subprocess.run(["cmp", *files]).returncode == 0
    try:
        held = dict(hf_tensors(open_megatron(megatron, read_architecture(LARGE)), None))
    except RuntimeError as error:
        return str(error), same
    return f"{len(held)} tensors fit in memory at once", same


def test_memory_is_for_a_few_tensors_however_large_the_model(tmp_path):
    size = (make_large(tmp_path) / "model.safetensors").stat().st_size
    assert size > 3 * LIMIT_BYTES
    ((naive, same),) = run_ranks(1, convert_in_little_memory, str(tmp_path), LIMIT_BYTES)
    assert same
    assert "can't allocate memory" in naive
    shutil.rmtree(tmp_path)


def test_progress_is_a_line_at_the_end_where_there_is_no_terminal(capsys):
    with shown_progress("x") as on_progress:
        for done in (1, 2, 3):
            on_progress(done * 10**9, 3 * 10**9)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"3\.00 GB of 3\.00 GB, \d+ MB/s, 0 s left", line)
