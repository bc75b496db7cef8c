"""Megatron checkpoints written and read in one process, against Megatron's own models and code."""

import dataclasses
import json
import os
import pickle
import pickletools
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights import megatron_save
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import hf_tensors, open_megatron
from megatron_opo.weights.megatron_save import save_megatron
from megatron_opo.weights.save import save_hf
from megatron_opo.weights.torch_dist import read_metadata
from tests.models import tiny_qwen3
from tests.ranks import run_ranks
from tests.test_model_parity import make_model

ROOT = Path(__file__).parents[1]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "qwen3 tied": (Qwen3Config, True, {}),
    "llama untied": (LlamaConfig, False, {}),
    "qwen2 untied": (Qwen2Config, False, {}),
    "experts": (Qwen3MoeConfig, False, EXPERTS),
    "a dense last layer": (Qwen3MoeConfig, False, EXPERTS | {"mlp_only_layers": [3]}),
}
LAYOUTS = {
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
    "EP2": {"expert_parallel": 2},
    "TP4, more ranks than key-value heads": {"tensor_parallel": 4, "sequence_parallel": True},
}
UP = "model.layers.1.mlp.up_proj.weight"


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def open_for(checkpoint: Path, model: Path):
    return open_megatron(checkpoint, read_architecture(config_of(model)))


def read_all(checkpoint: Path, model: Path, dtype: torch.dtype | None = None) -> dict:
    return dict(hf_tensors(open_for(checkpoint, model), dtype))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_model(root / name, cls, tied, num_hidden_layers=4, **changes)
        for name, (cls, tied, changes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory) -> dict[str, Path]:
    """Conversions of `models`, made of many small chunks."""
    root = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_save, "CHUNK_BYTES", 5000)
        for name, model in models.items():
            save_megatron(root / name, model, threads=3)
    return {name: root / name for name in models}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_equal_to_the_bit(name, models, converted):
    assert_same(
        read_all(converted[name], models[name]), load_file(models[name] / "model.safetensors")
    )


def fresh_model(model: Path, actor) -> list:
    from megatron_opo.actor.model import build_model

    modules = build_model(config_of(model), actor, "float32")
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
    return modules


def use_in_megatron(
    cases: dict[str, tuple[str, str, str]], layout: dict, forms: tuple[str, ...]
) -> dict:
    """On a rank, for each (model, its conversion, place to save to): what Megatron's model holds
    after Megatron loaded the conversion, and after `load_megatron` read what Megatron saved; and
    the rows that pad the vocabulary."""
    from megatron.core import dist_checkpointing

    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_megatron
    from tests.test_model_parity import padding_rows

    actor = ActorConfig(**layout)
    parallel = initialize(actor, seed=0)
    results = {}
    for name, (model, checkpoint, target) in cases.items():
        config = config_of(Path(model))
        first = fresh_model(Path(model), actor)
        state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(first)}
        loaded = dist_checkpointing.load(state, checkpoint)
        for i, chunk in enumerate(first):
            chunk.load_state_dict(loaded[f"model{i}"], strict=True)
        exports = [dict(export_hf(first, config, torch.float32))]
        padding = [padding_rows(chunk) for chunk in first]
        for form in forms:
            path = Path(target) / form
            if parallel.rank == 0:
                path.mkdir(parents=True)
            torch.distributed.barrier()
            metadata = {"non_homogeneous_layers": form == "per layer"}
            state = {
                f"model{i}": chunk.sharded_state_dict(metadata=metadata)
                for i, chunk in enumerate(first)
            }
            dist_checkpointing.save(state, str(path))
            torch.distributed.barrier()
        second = fresh_model(Path(model), actor)
        load_megatron(second, path, config)
        exports.append(dict(export_hf(second, config, torch.float32)))
        padding += [padding_rows(chunk) for chunk in second]
        values = [x for each in padding for rows in each.values() for x in rows.flatten().tolist()]
        results[name] = exports, values
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_it_in_every_layout_and_what_it_saves_is_read(
    layout, models, converted, tmp_path
):
    sizes = LAYOUTS[layout]
    ranks = sizes.get("tensor_parallel", 1) * sizes.get("pipeline_parallel", 1)
    ranks *= sizes.get("expert_parallel", 1)
    cases = {
        name: (str(models[name]), str(converted[name]), str(tmp_path / name))
        for name in models
        if sizes.get("expert_parallel", 1) == 1 or MODELS[name][0] is Qwen3MoeConfig
    }
    forms = ("stacked", "per layer") if layout == "TP2 PP2" else ("stacked",)
    results = run_ranks(ranks, use_in_megatron, cases, sizes, forms)
    for name in cases:
        expected = load_file(models[name] / "model.safetensors")
        for export in results[0][name][0]:
            assert_same(export, expected)
        padding = [value for rank in results for value in rank[name][1]]
        assert bool(padding) == (sizes.get("tensor_parallel", 1) > 1)
        assert not any(padding)
        for form in forms:
            assert_same(read_all(tmp_path / name / form, models[name]), expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_slice_is_that_of_the_whole_tensor(data, models, converted):
    name = data.draw(st.sampled_from([*MODELS]))
    checkpoint = open_for(converted[name], models[name])
    tensors = load_file(models[name] / "model.safetensors")
    tensor_name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[tensor_name]
    dim = data.draw(st.sampled_from(range(tensor.dim())))
    start = data.draw(st.integers(0, tensor.shape[dim]))
    end = data.draw(st.integers(start, tensor.shape[dim] + 3))
    expected = tensor[start:end] if dim == 0 else tensor[:, start:end]
    assert torch.equal(checkpoint.read(tensor_name, dim, start, end), expected)


def train_a_step(model: str, run_dir: str, overrides: list[str]) -> dict | None:
    """On a rank: a training checkpoint, and the export of what is in it."""
    from megatron_opo.weights.export import export_hf
    from tests.actor_cases import _step, open_actor, save

    actor = open_actor(model, run_dir, overrides)
    _step(actor)
    save(actor, {})
    return dict(export_hf(actor.modules, actor.hf_config, actor.dtype))


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, ["actor.tensor_parallel=2", "actor.pipeline_parallel=2"]),
        (1, ["optimizer.distributed=false", "model.dtype=bfloat16"]),
    ],
    ids=["TP2 PP2, distributed optimizer", "bfloat16, plain optimizer"],
)
def test_a_training_checkpoint_is_read_as_what_the_trainer_exports(ranks, overrides, tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    expected = run_ranks(ranks, train_a_step, str(model), str(tmp_path / "run"), overrides)[0]
    assert_same(read_all(tmp_path / "run" / "checkpoints" / "step_1", model), expected)
    start = load_file(model / "model.safetensors")
    assert not torch.equal(start[UP], expected[UP].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_chosen_dtype_is_one_rounding(dtype, models, converted, tmp_path):
    model = models["qwen3 tied"]
    expected = {n: t.to(dtype) for n, t in load_file(model / "model.safetensors").items()}
    assert_same(read_all(converted["qwen3 tied"], model, dtype), expected)
    save_megatron(tmp_path / "cast", model, dtype=dtype)
    assert_same(read_all(tmp_path / "cast", model), expected)


def test_what_has_dtypes_of_its_own_keeps_every_value(models, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(models["llama untied"], mixed)
    tensors = load_file(mixed / "model.safetensors")
    for name in tensors:
        if "proj" in name and "up_proj" not in name:
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    save_megatron(tmp_path / "megatron", mixed)
    found = read_all(tmp_path / "megatron", mixed)
    for name, tensor in tensors.items():
        # gate and up are one Megatron parameter, which has one dtype
        wide = tensor.float() if "mlp.gate_proj" in name else tensor
        assert found[name].dtype == wide.dtype, name
        assert torch.equal(found[name], wide), name


@pytest.fixture
def llama(models, converted, tmp_path) -> tuple[Path, Path]:
    """A model, and a conversion of it to damage."""
    shutil.copytree(converted["llama untied"], tmp_path / "damaged")
    return models["llama untied"], tmp_path / "damaged"


NESTED = 100_000 * '{"a":' + "1" + 100_000 * "}"


def data_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_something_is_refused_by_name(llama, protocol, tmp_path):
    model, checkpoint = llama
    harm = tmp_path / "harm"
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    found.planner_data = Harmful(harm)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found, protocol))
    assert pickle.loads((checkpoint / ".metadata").read_bytes()) is not None
    harm.rmdir()  # what a plain pickle.load has done
    with pytest.raises(CheckpointError, match=r"wants to load posix\.mkdir.*nothing was run"):
        open_for(checkpoint, model)
    assert not harm.exists()


def test_data_that_would_run_something_is_not_run(llama, tmp_path):
    model, checkpoint = llama
    harm = tmp_path / "harm"
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    torch.save(Harmful(harm), checkpoint / "__0_9.distcp")
    for place in found.storage_data.values():
        place.relative_path = "__0_9.distcp"
        place.offset, place.length = 0, (checkpoint / "__0_9.distcp").stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(WeightError, match=r"embedding\.word.*cannot be read from __0_9\.distcp"):
        read_all(checkpoint, model)
    assert not harm.exists()


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_metadata_is_one_clear_error(data, converted, tmp_path_factory):
    source = converted["llama untied"]
    checkpoint = tmp_path_factory.mktemp("damaged")
    for path in source.glob("*"):
        if path.name not in ("hf", ".metadata"):
            (checkpoint / path.name).symlink_to(path)
    original = (source / ".metadata").read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    damaged = data.draw(st.sampled_from(["cut", "changed", "removed"]))
    if damaged == "cut":
        content = original[:place]
    elif damaged == "changed":
        byte = data.draw(st.integers(0, 255))
        content = original[:place] + bytes([byte]) + original[place + 1 :]
    else:
        content = original[:place] + original[place + 1 :]
    (checkpoint / ".metadata").write_bytes(content)
    try:
        read_metadata(checkpoint)
    except CheckpointError as error:
        assert str(error).startswith(f"checkpoint {checkpoint}: ")
    else:
        assert damaged != "cut"


def test_a_damaged_memo_takes_no_memory(llama):
    """A damaged byte makes of a memo's number one of four bytes: CPython would make room for it."""
    model, checkpoint = llama
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    content = pickle.dumps(found, protocol=2)
    memo = next(at for opcode, _, at in pickletools.genops(content) if opcode.name == "BINPUT")
    content = content[:memo] + b"r" + (50_000_000).to_bytes(4, "little") + content[memo + 2 :]
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged \(.*memo 50,000,000"):
        open_for(checkpoint, model)


def _cut(checkpoint: Path) -> str:
    path = data_file(checkpoint)
    path.write_bytes(path.read_bytes()[:-200])
    return f"{path.name} is truncated"


def _absent(checkpoint: Path) -> str:
    path = data_file(checkpoint)
    path.unlink()
    return f"{path.name} is missing"


def _no_metadata(checkpoint: Path) -> str:
    (checkpoint / ".metadata").unlink()
    return r"\.metadata is missing: it was not written to its end"


def _no_format(checkpoint: Path) -> str:
    (checkpoint / "metadata.json").unlink()
    return "not a Megatron distributed checkpoint"


def _other_format(checkpoint: Path) -> str:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return "says the format 'zarr'; allowed: 'torch_dist'"


def _outside(checkpoint: Path) -> str:
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(found.storage_data.values())).relative_path = "../secret"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    return "names the file '../secret'"


def _lost_chunk(checkpoint: Path) -> str:
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    del found.state_dict_metadata["output_layer.weight"].chunks[2]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    return "`output_layer.weight` is not whole"


def _overwritten(checkpoint: Path) -> str:
    path = data_file(checkpoint)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"\0" * size)
    return rf"cannot be read from {path.name} \(what describes .* is damaged\); copy it again"


def _unknown_class(checkpoint: Path) -> str:
    """Where torch would advise to load it all the same."""
    path = data_file(checkpoint)
    content = path.read_bytes()
    assert b"torch._utils\n_rebuild_tensor_v2" in content
    path.write_bytes(
        content.replace(b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor_vX")
    )
    return rf"cannot be read from {path.name} \(what describes .* is damaged\); copy it again"


def _edited(checkpoint: Path, edit) -> None:
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    edit(found.state_dict_metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))


def _no_properties(checkpoint: Path) -> str:
    _edited(checkpoint, lambda tensors: setattr(tensors["output_layer.weight"], "properties", None))
    return r"\.metadata is damaged \(`output_layer\.weight` has no properties\)"


def _no_dtype(checkpoint: Path) -> str:
    _edited(
        checkpoint,
        lambda tensors: setattr(tensors["output_layer.weight"].properties, "dtype", None),
    )
    return r"\.metadata is damaged \(`output_layer\.weight` has no dtype\)"


def _quantised(checkpoint: Path) -> str:
    _edited(
        checkpoint,
        lambda tensors: setattr(tensors["output_layer.weight"].properties, "dtype", torch.int8),
    )
    return r"`output_layer\.weight` has dtype torch\.int8; allowed: .*torch\.bfloat16"


def _no_place(checkpoint: Path) -> str:
    _edited(
        checkpoint,
        lambda tensors: setattr(tensors["output_layer.weight"].chunks[0], "sizes", None),
    )
    return r"`output_layer\.weight` has a chunk without a place"


def _no_name(checkpoint: Path) -> str:
    _edited(checkpoint, lambda tensors: tensors.update({7: tensors["output_layer.weight"]}))
    return "a tensor's name is 7"


def _control_characters(checkpoint: Path) -> str:
    def add(tensors):
        tensors["\x1b[2J"] = tensors.pop("output_layer.weight")

    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    add(found.state_dict_metadata)
    found.storage_data = {
        dataclasses.replace(index, fqn="\x1b[2J")
        if index.fqn == "output_layer.weight"
        else index: p
        for index, p in found.storage_data.items()
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    return r"1 unexpected: '\\x1b\[2J'"


def _nested_format(checkpoint: Path) -> str:
    (checkpoint / "metadata.json").write_text(NESTED)
    return r"metadata\.json cannot be used \(RecursionError"


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _absent,
        _no_metadata,
        _no_format,
        _other_format,
        _outside,
        _lost_chunk,
        _overwritten,
        _unknown_class,
        _no_properties,
        _no_dtype,
        _quantised,
        _no_place,
        _no_name,
        _control_characters,
        _nested_format,
    ],
)
def test_damage_is_named_and_nothing_is_written(damage, llama, tmp_path):
    model, checkpoint = llama
    message = damage(checkpoint)
    with pytest.raises((CheckpointError, WeightError), match=message) as caught:
        save_hf(
            tmp_path / "out" / "hf",
            hf_tensors(open_for(checkpoint, model), None),
            source=model,
        )
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("held", "changes", "message"),
    [
        ("llama untied", {"model_type": "qwen3", "head_dim": 24}, r"8 missing: .*q_layernorm"),
        ("qwen3 tied", {"model_type": "llama"}, r"2 unexpected: .*q_layernorm"),
        ("llama untied", {"tie_word_embeddings": True}, r"1 unexpected: output_layer\.weight"),
        ("qwen3 tied", {"tie_word_embeddings": False}, r"1 missing: output_layer\.weight"),
        ("llama untied", {"intermediate_size": 80}, r"misshapen: .*is \[4, 320, 64\], must be"),
        ("llama untied", {"num_hidden_layers": 3}, r"misshapen: .*must be \[3, 288, 64\]"),
        ("llama untied", {"vocab_size": 1005}, r"must be \[1005, 64\] \(or padded"),
        (
            "experts",
            {"num_experts": 8, "num_local_experts": 8},
            r"misshapen: .*is \[4, 4, 96, 64\], must be \[4, 8,",
        ),
    ],
)
def test_another_model_is_refused_by_its_parameters(held, changes, message, models, converted):
    config = config_of(models[held]) | changes
    with pytest.raises(WeightError, match=message) as caught:
        open_megatron(converted[held], read_architecture(config))
    assert "does not hold the" in str(caught.value)


def edited(model: Path, target: Path, name: str, edit) -> Path:
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name] = edit(tensors[name].clone())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[-1, -1] = torch.nan
    return tensor


def test_weights_that_are_not_finite_are_refused_by_name(models, monkeypatch, tmp_path):
    model = models["llama untied"]
    bad = edited(model, tmp_path / "bad", UP, _with_nan)
    large = edited(model, tmp_path / "large", UP, lambda tensor: tensor + 1e5)
    with pytest.raises(WeightError, match=rf"`{UP}` holds NaN or infinity"):
        save_megatron(tmp_path / "out" / "megatron", bad)
    with pytest.raises(WeightError, match=rf"`{UP}` holds values that torch\.float16 cannot"):
        save_megatron(tmp_path / "out" / "megatron", large, dtype=torch.float16)
    assert list((tmp_path / "out").iterdir()) == []
    save_megatron(tmp_path / "large_megatron", large)
    with pytest.raises(WeightError, match=rf"`{UP}` .* holds values that torch\.float16 cannot"):
        read_all(tmp_path / "large_megatron", model, torch.float16)
    monkeypatch.setattr(megatron_save, "is_finite", lambda tensor: True)
    save_megatron(tmp_path / "bad_megatron", bad)
    with pytest.raises(WeightError, match=rf"`{UP}` \(in `decoder\..*`\) holds NaN"):
        read_all(tmp_path / "bad_megatron", model)


def test_a_head_that_a_tied_model_stores_must_be_the_embedding(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models["qwen3 tied"], other)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    save_megatron(tmp_path / "same", other)
    tensors["lm_head.weight"][-1] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"tie_word_embeddings, but `lm_head\.weight` differs"):
        save_megatron(tmp_path / "differs", other)


@pytest.mark.parametrize("shape", [(), (1005,), (1004, 64)])
def test_a_head_that_a_tied_model_stores_must_have_the_embeddings_shape(shape, models, tmp_path):
    other = edited(models["qwen3 tied"], tmp_path / "other", UP, lambda tensor: tensor)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(shape)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    must = list(tensors["model.embed_tokens.weight"].shape)
    message = rf"1 misshapen: lm_head\.weight is {re.escape(str(list(shape)))}, must be "
    with pytest.raises(WeightError, match=message + re.escape(str(must))):
        save_megatron(tmp_path / "megatron", other)


def test_a_source_that_is_no_model_directory_is_said_in_the_right_words(models, tmp_path):
    model, odd = models["llama untied"], tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(NESTED)
    (tmp_path / "dir" / "config.json").mkdir(parents=True)
    for source, message in (
        (model / "config.json", r"config\.json is a file: give the Hugging Face model directory"),
        (odd, r"odd/config\.json is nested too deeply"),
        (tmp_path / "dir", r"dir/config\.json cannot be read: .*Is a directory"),
        (tmp_path / "absent", r"absent/config\.json does not exist: give"),
    ):
        with pytest.raises(WeightError, match=message):
            save_megatron(tmp_path / "megatron", source)


def test_what_cannot_be_written_leaves_nothing(models, monkeypatch, tmp_path):
    model, target = models["llama untied"], tmp_path / "out" / "megatron"
    target.mkdir(parents=True)
    (target / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="exists already"):
        save_megatron(target, model)
    assert [path.name for path in target.iterdir()] == ["mine"]
    shutil.rmtree(target)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(CheckpointError, match=r"needs 1\.\d MB of disk, but only 1\.0 MB are"):
        save_megatron(target, model)
    assert list(target.parent.iterdir()) == []


def save_on_a_full_disk(model: str, target: str) -> str:
    """The error; files may not grow past 500 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        save_megatron(Path(target), Path(model))
    return str(caught.value)


def test_a_disk_that_fills_up_is_a_clear_error(models, tmp_path):
    target = tmp_path / "out" / "megatron"
    (message,) = run_ranks(1, save_on_a_full_disk, str(models["llama untied"]), str(target))
    assert message.startswith(f"{target} cannot be written: ")
    assert list(target.parent.iterdir()) == []


STOP_HALFWAY = """
import sys
from pathlib import Path
from megatron_opo.weights import megatron_save

def halt(done, total):
    if done > total // 2:
        print("halfway", flush=True)
        sys.stdin.read()

megatron_save.CHUNK_BYTES = 5000
megatron_save.save_megatron(Path(sys.argv[1]), Path(sys.argv[2]), on_progress=halt)
"""


def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_can_be_run_again(models, tmp_path):
    model, target = models["llama untied"], tmp_path / "out" / "megatron"
    process = subprocess.Popen(
        [sys.executable, "-c", STOP_HALFWAY, target, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout.readline() == "halfway\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = target.parent.iterdir()
    assert left.name.startswith(".megatron.partial")
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        open_for(left, model)
    save_megatron(target, model)
    assert [path.name for path in target.parent.iterdir()] == ["megatron"]
    assert_same(read_all(target, model), load_file(model / "model.safetensors"))
