"""Mixtures of experts in every layout: computed, trained, saved and exported as one rank would."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.actor_cases import resume_and_train, train_and_save, train_two_steps
from tests.models import tiny_qwen3_moe
from tests.ranks import run_ranks
from tests.test_layouts import assert_matches, reference_training

TP2 = ["actor.tensor_parallel=2", "actor.sequence_parallel=true"]
PP2 = ["actor.pipeline_parallel=2"]
CHUNKS = ["actor.virtual_pipeline=2"]
EP2 = ["actor.expert_parallel=2"]
WHOLE = ["actor.expert_tensor_parallel=1"]
LAYOUTS = {
    "one rank": (1, []),
    "EP2": (2, EP2),
    "EP2, recompute, optimizer not sharded": (
        2,
        [*EP2, "actor.recompute=full", "optimizer.distributed=false"],
    ),
    "TP2, whole experts on both ranks": (2, [*TP2, *WHOLE]),
    "TP2, whole experts, EP2": (2, [*TP2, *WHOLE, *EP2]),
    "TP2 EP2 in buckets": (4, [*TP2, *EP2, "actor.grad_bucket_mb=0.02"]),
    "CP2 EP2": (2, ["actor.context_parallel=2", *EP2]),
    "PP2 EP2": (4, [*PP2, *EP2]),
    "PP2 in 2 chunks each, EP2 in buckets, one micro-batch too few": (
        4,
        [*PP2, *CHUNKS, *EP2, "actor.micro_batch_tokens=4096", "actor.grad_bucket_mb=0.02"],
    ),
}


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' parameters, its stacked experts taken apart into those of a checkpoint."""
    apart = {}
    for name, tensor in weights.items():
        prefix, _, stacked = name.partition(".experts.")
        if not stacked:
            apart[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if stacked == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            apart |= {f"{prefix}.experts.{i}.{part}.weight": x for part, x in parts.items()}
    return apart


def reference(model: Path) -> dict:
    """Two steps by transformers in float64, whose routing no rounding can turn."""
    margins = []

    def measure(router, _, output) -> None:
        probs = output[0].detach().softmax(-1).topk(router.top_k + 1).values
        margins.append((probs[:, -2] - probs[:, -1]).min().item())

    def watch(model) -> None:
        for module in model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.register_forward_hook(measure)

    result = reference_training(model, "token-mean", watch, experts_implementation="eager")
    assert margins
    assert min(margins) > 2e-5, "choose another seed"
    return result | {"weights": by_expert(result["weights"])}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model whose second layer has a dense MLP."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("mixed") / "model")


def test_every_layout_takes_the_same_two_steps(mixed, tmp_path):
    expected = reference(mixed)
    for layout, (ranks, overrides) in LAYOUTS.items():
        result = run_ranks(ranks, train_two_steps, str(mixed), str(tmp_path / layout), overrides)[0]
        try:
            assert_matches(result, expected)
        except AssertionError as error:
            raise AssertionError(f"layout {layout}: {error}") from error


def test_weights_of_experts_that_do_not_sum_to_one(tmp_path):
    model = tiny_qwen3_moe(tmp_path / "model", norm_topk_prob=False, mlp_only_layers=[])
    overrides = LAYOUTS["TP2, whole experts, EP2"][1]
    result = run_ranks(2, train_two_steps, str(model), str(tmp_path / "run"), overrides)[0]
    assert_matches(result, reference(model))


@pytest.mark.parametrize(
    ("saved", "loaded", "dense"),
    [
        ("TP2, whole experts, EP2", ("one rank", "PP2 in 2 chunks"), []),
        ("PP2 in 2 chunks", ("PP2 in 2 chunks", "EP2"), [1]),
    ],
)
def test_a_checkpoint_resumes_in_other_layouts(saved, loaded, dense, tmp_path):
    layouts = LAYOUTS | {"PP2 in 2 chunks": (2, [*PP2, *CHUNKS])}
    model, run_dir = str(tmp_path / "model"), str(tmp_path / "run")
    tiny_qwen3_moe(model, mlp_only_layers=dense)
    ranks, overrides = layouts[saved]
    undisturbed = run_ranks(ranks, train_and_save, model, run_dir, overrides)[0]
    for layout in loaded:
        ranks, overrides = layouts[layout]
        resumed = run_ranks(ranks, resume_and_train, model, run_dir, overrides)[0]
        assert resumed["restored"] == (1, 1, {"row": 7})
        tolerance = 0 if layout == saved else 2e-6
        for name, weight in undisturbed["weights"].items():
            np.testing.assert_allclose(
                resumed["weights"][name], weight, rtol=0, atol=tolerance, err_msg=layout
            )


def load_and_export(directories: list[str], layout: dict):
    """For each model: this rank's experts as they lie in its modules, by layer and module name, and
    what is exported in buckets of three sizes."""
    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(**layout)
    parallel = initialize(actor, seed=0)
    results = []
    for directory in directories:
        config = json.loads((Path(directory) / "config.json").read_text())
        model = build_model(config, actor, "float32")
        load_hf(model, Path(directory), config)
        held = {
            (layer.layer_number - 1, name): parameter.detach().clone()
            for chunk in model
            for layer in chunk.decoder.layers
            for name, parameter in layer.mlp.named_parameters()
            if name.startswith("experts.")
        }
        exports = [
            dict(export_hf(model, config, torch.float32, bucket_bytes=size))
            for size in (1, 100_000, 2**30)
        ]
        results.append((held, exports))
    return (parallel.ep_rank, parallel.expert_tp_rank), results


def exchange_experts(tensors: dict[str, torch.Tensor], layer: int, one: int, other: int) -> dict:
    names = {one: other, other: one}

    def renamed(name: str) -> str:
        for number, instead in names.items():
            prefix = f"model.layers.{layer}.mlp.experts."
            if name.startswith(f"{prefix}{number}."):
                return name.replace(f"{prefix}{number}.", f"{prefix}{instead}.")
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "layout",
    [
        {"expert_parallel": 2, "data_parallel": 4, "expert_tensor_parallel": 2},
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ],
)
def test_every_expert_lies_in_its_slot_and_comes_back_from_it(mixed, tmp_path, layout):
    """Also when two experts of one layer change places: these move, and nothing else."""
    stored = load_file(mixed / "model.safetensors")
    exchanged = exchange_experts(stored, layer=2, one=0, other=3)
    other = tmp_path / "exchanged"
    other.mkdir()
    save_file(exchanged, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_bytes((mixed / "config.json").read_bytes())
    moved = {name for name in stored if not torch.equal(stored[name], exchanged[name])}
    assert len(moved) == 6
    ranks = run_ranks(4, load_and_export, [str(mixed), str(other)], layout)
    for which, tensors in enumerate((stored, exchanged)):
        for (ep_rank, slice_rank), results in ranks:
            held, exports = results[which]
            slices = layout["expert_tensor_parallel"]
            for (layer, name), parameter in held.items():
                slot, kind = name.removeprefix("experts.local_experts.").split(".", 1)
                prefix = f"model.layers.{layer}.mlp.experts.{2 * ep_rank + int(slot)}."
                gate, up, down = (
                    tensors[f"{prefix}{p}_proj.weight"] for p in ("gate", "up", "down")
                )
                if kind == "linear_fc1.weight":
                    cut = (x.chunk(slices)[slice_rank] for x in (gate, up))
                    assert torch.equal(parameter, torch.cat([*cut])), name
                else:
                    assert torch.equal(parameter, down.chunk(slices, dim=1)[slice_rank]), name
            if exports[0]:
                for export in exports:
                    assert export.keys() == tensors.keys()
                    assert list(export) == list(exports[0])
                    for name, tensor in export.items():
                        assert torch.equal(tensor, tensors[name]), name
                        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert [bool(results[which][1][0]) for _, results in ranks] == [True, False, False, False]
    # Three layers with two of four experts on each rank, or half of these layers.
    stages = layout.get("pipeline_parallel", 1)
    assert {len(results[0][0]) for _, results in ranks} == ({12} if stages == 1 else {4, 8})


def export_of_another_config(directory: str) -> str:
    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.errors import WeightError
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf

    actor = ActorConfig(expert_parallel=2)
    initialize(actor, seed=0)
    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, "float32")
    with pytest.raises(WeightError) as caught:
        next(export_hf(model, config | {"num_hidden_layers": 5}, torch.float32))
    return str(caught.value)


def test_a_model_with_layers_missing_is_not_exported(mixed):
    for message in run_ranks(2, export_of_another_config, str(mixed)):
        assert "no rank holds `decoder.layers.4." in message


def route(directory: str, hidden: torch.Tensor):
    """A layer's router: its weight, and for each token the weights of all experts."""
    from megatron_opo.actor.model import build_model
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig()
    initialize(actor, seed=0)
    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, "bfloat16")
    load_hf(model, Path(directory), config)
    router = model[0].decoder.layers[0].mlp.router
    probs, _ = router(hidden[:, None])
    return router.weight.detach(), probs.detach()


@pytest.mark.parametrize("normalized", [True, False])
def test_bfloat16_routes_every_token_as_transformers_does(normalized, tmp_path):
    """Rounded logits decide between experts that are close, so they must be rounded alike."""
    shape = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": normalized}
    model = tiny_qwen3_moe(tmp_path / "model", mlp_only_layers=[], num_hidden_layers=1, **shape)
    hidden = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    ((weight, probs),) = run_ranks(1, route, str(model), hidden)
    assert probs.dtype == torch.float32
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=128, **shape)).bfloat16()
    router.weight.data.copy_(weight)
    with torch.no_grad():
        _, scores, chosen = router(hidden)
    expected = torch.zeros_like(probs).scatter(1, chosen, scores.float())
    assert torch.equal(probs != 0, expected != 0)
    torch.testing.assert_close(probs, expected, rtol=2**-8, atol=0)
