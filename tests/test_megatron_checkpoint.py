"""Megatron checkpoints written and read in one process, against Megatron's own models and code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from megatron_opo.weights.families import read_architecture
from megatron_opo.weights.megatron_checkpoint import hf_tensors, open_megatron
from megatron_opo.weights.megatron_save import save_megatron
from tests.ranks import run_ranks
from tests.test_model_parity import make_model

MODELS = {
    "qwen3 tied": (Qwen3Config, True),
    "llama untied": (LlamaConfig, False),
    "qwen2 untied": (Qwen2Config, False),
}

LAYOUTS = {
    "TP1": {},
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "TP4, more ranks than key-value heads": {"tensor_parallel": 4},
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def read_all(checkpoint: Path, model: Path, dtype: torch.dtype | None = None) -> dict:
    return dict(hf_tensors(open_megatron(checkpoint, read_architecture(config_of(model))), dtype))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def load_by_megatron(checkpoint: str, model: str, layout: dict) -> tuple[dict, list[float]]:
    """On a rank: Megatron's own loading into its own model; the export, and what stands in the rows
    that pad the vocabulary."""
    from megatron.core import dist_checkpointing

    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from tests.test_model_parity import padding_rows

    actor = ActorConfig(**layout)
    initialize(actor, seed=0)
    config = config_of(Path(model))
    (module,) = build_model(config, actor, "float32")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    loaded = dist_checkpointing.load({"model": module.sharded_state_dict()}, checkpoint)
    module.load_state_dict(loaded["model"], strict=True)
    padding = [value for rows in padding_rows(module).values() for value in rows.flatten().tolist()]
    return dict(export_hf([module], config, torch.float32)), padding


@pytest.fixture(scope="module", params=MODELS)
def converted(request, tmp_path_factory) -> tuple[Path, Path]:
    """A Hugging Face model, and its conversion."""
    root = tmp_path_factory.mktemp("converted")
    model = make_model(root / "model", *MODELS[request.param])
    save_megatron(root / "megatron", model)
    return model, root / "megatron"


def test_there_and_back_is_equal_to_the_bit(converted):
    model, checkpoint = converted
    assert_same(read_all(checkpoint, model), load_file(model / "model.safetensors"))


def test_megatron_loads_it_in_every_layout(converted):
    model, checkpoint = converted
    expected = load_file(model / "model.safetensors")
    for name, layout in LAYOUTS.items():
        ranks = layout.get("tensor_parallel", 1) * layout.get("pipeline_parallel", 1)
        results = run_ranks(ranks, load_by_megatron, str(checkpoint), str(model), layout)
        assert_same(results[0][0], expected)
        padding = [value for _, values in results for value in values]
        assert len(padding) > 0 if "TP1" not in name and name != "PP2" else not padding
        assert not any(padding)
