"""Weights on disk: what is written, what is refused, and that every rank learns of it."""

import json
import os
import select
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights.save import save_hf
from tests.models import tiny_qwen3
from tests.ranks import RankError, run_ranks
from tests.test_model_parity import make_model

UP = "model.layers.1.mlp.up_proj.weight"


def load_on_rank(directory: str, layout: dict, dtype: str = "float32") -> dict | str:
    """The export after loading, or the error's text."""
    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(**layout)
    initialize(actor, seed=0)
    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, dtype)
    try:
        load_hf(model, Path(directory), config)
    except WeightError as error:
        return str(error)
    return dict(export_hf(model, config, getattr(torch, dtype)))


def load_all(cases: dict[str, str], layout: dict) -> dict[str, dict | str]:
    return {name: load_on_rank_again(path, layout) for name, path in cases.items()}


def load_on_rank_again(directory: str, layout: dict) -> dict | str:
    from megatron_opo.actor.parallel import shutdown

    try:
        return load_on_rank(directory, layout)
    finally:
        shutdown()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", LlamaConfig, False)


def edited(model: Path, target: Path, edit) -> Path:
    """A copy of the model whose tensors went through `edit`."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _set(name, value):
    def edit(tensors):
        tensors[name] = value(tensors[name])

    return edit


def _nan_in_last_row(tensor):
    tensor = tensor.clone()
    tensor[-1, -1] = torch.nan
    return tensor


BAD_TENSORS = {
    "missing": (lambda t: t.pop(UP), f"1 missing: {UP}"),
    "unexpected": (lambda t: t.update(extra=torch.ones(1)), "1 unexpected: extra"),
    "misshapen": (_set(UP, lambda x: x[:-1].clone()), f"{UP} is [159, 64], must be [160, 64]"),
    "transposed": (_set(UP, lambda x: x.t().contiguous()), "is [64, 160], must be [160, 64]"),
    "nan": (_set(UP, _nan_in_last_row), f"`{UP}` holds NaN or infinity"),
    "quantised": (_set(UP, lambda x: x.to(torch.float8_e4m3fn)), f"`{UP}` has dtype F8_E4M3"),
    "integer": (_set(UP, lambda x: x.to(torch.int32)), f"`{UP}` has dtype I32"),
}


def shard(model: Path, target: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(target, max_shard_size="200KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    return target


def _absent_file(directory: Path) -> str:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.unlink()
    return f"names {file.name}, which does not exist"


def _truncated(directory: Path) -> str:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file} is truncated or not a safetensors file"


def _not_safetensors(directory: Path) -> str:
    file = sorted(directory.glob("model-*.safetensors"))[0]
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    return f"{file} is truncated or not a safetensors file"


def _wrong_file_in_index(directory: Path) -> str:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    moved = next(n for n, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][moved] = files[1]
    path.write_text(json.dumps(index))
    return f"says `{moved}` is in {files[1]}, which does not hold it"


def _broken_index(directory: Path) -> str:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ')
    return "is not a valid index"


def _index_that_leaves_the_directory(directory: Path) -> str:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "../../secret"}}))
    return "must name files beside the index"


def _no_index_and_a_duplicate(directory: Path) -> str:
    (directory / "model.safetensors.index.json").unlink()
    first = sorted(directory.glob("model-*.safetensors"))[0]
    shutil.copyfile(first, directory / "other.safetensors")
    return "keep the files of one model only"


def _no_weights(directory: Path) -> str:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    return "holds no *.safetensors file"


BAD_FILES = (
    _absent_file,
    _truncated,
    _not_safetensors,
    _wrong_file_in_index,
    _broken_index,
    _index_that_leaves_the_directory,
    _no_index_and_a_duplicate,
    _no_weights,
)


def test_bad_weights_are_refused_by_name(llama, tmp_path):
    cases, expected = {}, {}
    for name, (edit, message) in BAD_TENSORS.items():
        cases[name] = str(edited(llama, tmp_path / name, edit))
        expected[name] = message
    for damage in BAD_FILES:
        directory = shard(llama, tmp_path / damage.__name__)
        expected[damage.__name__] = damage(directory)
        cases[damage.__name__] = str(directory)
    (results,) = run_ranks(1, load_all, cases, {})
    for name, message in expected.items():
        assert isinstance(results[name], str), f"{name} was accepted"
        assert message in results[name], name
        assert cases[name] in results[name], name


def test_every_rank_raises_when_one_finds_a_bad_slice(llama, tmp_path):
    """The last row of a column-parallel weight is read by the last tensor-parallel rank only."""
    directory = edited(llama, tmp_path / "nan", _set(UP, _nan_in_last_row))
    results = run_ranks(2, load_on_rank, str(directory), {"tensor_parallel": 2})
    assert results[0] == results[1]
    assert f"`{UP}` holds NaN or infinity" in results[0]


def test_a_value_that_the_training_dtype_cannot_hold_is_refused(llama, tmp_path):
    directory = edited(llama, tmp_path / "large", _set(UP, lambda x: x.clamp(max=0) + 1e5))
    (result,) = run_ranks(1, load_on_rank, str(directory), {}, "float16")
    assert "holds values that torch.float16 cannot represent" in result


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path):
    tied = make_model(tmp_path / "tied", Qwen3Config, True)
    embedding = "model.embed_tokens.weight"
    cases = {
        "same": edited(
            tied, tmp_path / "same", lambda t: t.update({"lm_head.weight": t[embedding].clone()})
        ),
        "other": edited(
            tied, tmp_path / "other", lambda t: t.update({"lm_head.weight": t[embedding] + 1})
        ),
    }
    (results,) = run_ranks(1, load_all, {name: str(path) for name, path in cases.items()}, {})
    assert "lm_head.weight" not in results["same"]
    assert "tie_word_embeddings, but `lm_head.weight` differs" in results["other"]


def test_sharded_bfloat16_weights_come_back_to_the_bit(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2}
    results = run_ranks(4, load_on_rank, str(tmp_path / "sharded"), layout, "bfloat16")
    assert {k: v.shape for k, v in results[0].items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(results[0][name], tensor), name


def export_twice_and_break(directory: str, layout: dict) -> tuple[bool, str]:
    """Is an export unmoved by later changes of the model; what does another config give?"""
    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(**layout)
    initialize(actor, seed=0)
    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, "float32")
    load_hf(model, Path(directory), config)
    kept = dict(export_hf(model, config, torch.float32))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    apart = all(tensor.count_nonzero() > 0 for tensor in kept.values())
    try:
        list(export_hf(model, config | {"intermediate_size": 320}, torch.float32))
    except WeightError as error:
        return apart, str(error)
    return apart, "accepted"


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel": 2}])
def test_an_export_is_a_copy_and_of_the_model_that_the_config_describes(llama, layout):
    results = run_ranks(
        layout.get("pipeline_parallel", 1), export_twice_and_break, str(llama), layout
    )
    for apart, error in results:
        assert apart
        assert "mlp.linear_fc1.weight` is [320, 64], but config.json says [640, 64]" in error


def test_a_saved_directory_is_a_whole_model_for_transformers(tmp_path):
    source = tiny_qwen3(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.5}')
    (source / "notes.txt").write_text("not part of a model")
    weights = load_file(source / "model.safetensors")
    doubled = {name: (2 * tensor).bfloat16() for name, tensor in ordered(source, weights)}
    for target, shard_bytes in ((tmp_path / "one", 10**9), (tmp_path / "many", 300_000)):
        save_hf(target, iter(doubled.items()), source=source, max_shard_bytes=shard_bytes)
        model = AutoModelForCausalLM.from_pretrained(target)
        assert model.dtype == torch.bfloat16
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in doubled.items())
        assert model.generation_config.temperature == 0.5
        text = "3 + 4 = 7"
        tokenizer = AutoTokenizer.from_pretrained(target)
        assert tokenizer(text) == AutoTokenizer.from_pretrained(source)(text)
        assert tokenizer.chat_template
        assert not (target / "notes.txt").exists()
        files = list(target.glob("*.safetensors"))
        assert (len(files) > 2) == (shard_bytes == 300_000)
        if len(files) > 1:
            assert all(file.stat().st_size < 2 * shard_bytes for file in files)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "one", "many"}


def ordered(source: Path, weights: dict):
    model = AutoModelForCausalLM.from_pretrained(source)
    return [(name, weights[name]) for name in model.state_dict() if name in weights]


@pytest.fixture
def counted(llama):
    """All tensors of a model, and how many have been taken."""
    taken = []

    def weights():
        for name, tensor in ordered(llama, load_file(llama / "model.safetensors")):
            taken.append(name)
            yield name, tensor

    return weights(), taken, len(load_file(llama / "model.safetensors"))


def test_an_existing_directory_is_not_touched(llama, counted, tmp_path):
    weights, taken, total = counted
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="exists already"):
        save_hf(target, weights, source=llama)
    assert [path.name for path in target.iterdir()] == ["mine"]
    assert taken == []
    assert len(list(weights)) == total


def save_on_a_full_disk(source: str, target: str) -> str:
    """The error; files may not grow past 60 kB."""
    import resource

    weights = ordered(Path(source), load_file(Path(source) / "model.safetensors"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    try:
        save_hf(
            Path(target),
            weights,
            source=Path(source),
            max_shard_bytes=50_000,
        )
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_failed_write_leaves_nothing_behind(llama, tmp_path):
    target = tmp_path / "out" / "hf"
    (error,) = run_ranks(1, save_on_a_full_disk, str(llama), str(target))
    assert error.startswith(f"{target} cannot be written: ")
    assert list(target.parent.iterdir()) == []


def test_incomplete_weights_are_not_saved(llama, counted, tmp_path):
    weights = [pair for pair in counted[0] if pair[0] != UP]
    with pytest.raises(WeightError, match="20 tensors were to be saved"):
        save_hf(tmp_path / "hf", weights, source=llama)
    assert list(tmp_path.iterdir()) == []


def fail_on_last_rank(count: int) -> int:
    rank = int(os.environ["RANK"])
    if rank == count - 1:
        raise RuntimeError("as planned")
    return rank


def die(count: int) -> None:
    os._exit(3)


def test_the_harness_reports_errors_deaths_and_hangs():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2:.*as planned"):
        run_ranks(2, fail_on_last_rank, 2)
    with pytest.raises(RankError, match="died without an answer"):
        run_ranks(1, die, 1)
    with pytest.raises(RankError, match="not done after"):
        run_ranks(1, wait_forever, timeout_s=0.5)


def wait_forever() -> None:
    import threading

    threading.Event().wait()


def leave_a_child_behind() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "300"]).pid


def test_the_harness_ends_what_a_rank_started():
    (pid,) = run_ranks(1, leave_a_child_behind)
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([ended], [], [], 10)
    os.close(ended)
    assert readable
