"""The Megatron model against transformers: logits and gradients, in every layout, both ways."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.ranks import run_ranks

LENGTHS = [5, 17, 1, 40, 9]
LAYOUTS = {
    "TP1": {},
    "TP1 recompute": {"recompute": "full"},
    "TP2": {"tensor_parallel": 2},
    "TP2 sequence parallel": {"tensor_parallel": 2, "sequence_parallel": True},
    "PP2": {"pipeline_parallel": 2},
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
# A vocabulary that two ranks cannot share evenly; grouped queries; heads wider than hidden / heads.
SHAPE = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "qwen3 tied": (Qwen3Config, True),
    "qwen3 untied": (Qwen3Config, False),
    "llama tied": (LlamaConfig, True),
    "llama untied": (LlamaConfig, False),
}


def make_model(directory: Path, cls, tied: bool, **changes) -> Path:
    config = cls(**SHAPE | {"tie_word_embeddings": tied} | changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # Norm weights away from 1 and logits away from uniform, or mistakes would hide.
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(directory)
    return directory


def reference_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V], each sequence on its own."""
    return torch.cat([model(x[None]).logits[0] for x in tokens.split(LENGTHS)])


def run_model(directory: str, tokens: torch.Tensor, layout: dict):
    """On a rank: load, compute logits, export; (logits, export) where they are whole."""
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(**layout)
    parallel = initialize(actor, seed=0)
    from megatron_opo.actor.model import build_model

    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, "float32")
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(torch.nan)
    load_hf(model, Path(directory), config)
    exported = dict(export_hf(model, config, torch.float32))
    return forward(model[0], parallel, tokens), exported, padding_rows(model[0])


def packed_params(lengths: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def forward(model, parallel, tokens: torch.Tensor) -> torch.Tensor | None:
    """[T, V] on the last pipeline stage, hidden states passed by hand from stage to stage."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from megatron.core import tensor_parallel

    from megatron_opo.actor.model import output_weight

    pipeline = state.get_pipeline_model_parallel_group()
    split = parallel.tp_size if model.config.sequence_parallel else 1
    if parallel.pp_rank:
        hidden = torch.empty(len(tokens) // split, 1, model.config.hidden_size)
        dist.recv(hidden, group=pipeline, group_src=parallel.pp_rank - 1)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        hidden = model(tokens[None], packed_seq_params=packed_params(LENGTHS))
        assert hidden.shape == (len(tokens) // split, 1, model.config.hidden_size)
        if not parallel.is_last_stage:
            dist.send(hidden, group=pipeline, group_dst=parallel.pp_rank + 1)
            return None
        if model.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        local = hidden[:, 0] @ output_weight(model).t()
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(local)
    return logits[:, : model.hf_vocab_size]


def padding_rows(model) -> dict[str, torch.Tensor]:
    """What stands past the vocabulary on this rank, by parameter."""
    from megatron.core import parallel_state as state

    rank = state.get_tensor_model_parallel_rank()
    rows = {}
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            rows[name] = parameter.detach()[max(model.hf_vocab_size - rank * len(parameter), 0) :]
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_the_logits_of_transformers_and_the_same_weights_back(name, tmp_path):
    directory = make_model(tmp_path / "model", *MODELS[name])
    tokens = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),))
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        expected = reference_logits(reference, tokens)
    stored = load_file(directory / "model.safetensors")
    for layout_name, layout in LAYOUTS.items():
        tp, pp = layout.get("tensor_parallel", 1), layout.get("pipeline_parallel", 1)
        results = run_ranks(tp * pp, run_model, str(directory), tokens, layout)
        logits = [logits for logits, _, _ in results if logits is not None]
        assert len(logits) == tp, layout_name
        for each in logits:
            gap = (each - expected).abs().max().item()
            print(f"{name}, {layout_name}: largest logit difference {gap:.1e}")
            assert gap < 5e-5, layout_name
        exported = results[0][1]
        assert list(exported) == [*reference.state_dict()][: len(exported)]
        assert exported.keys() == stored.keys(), layout_name
        for tensor_name, tensor in exported.items():
            assert torch.equal(tensor, stored[tensor_name]), f"{layout_name}: {tensor_name}"
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, tensor_name
        assert all(not other for _, other, _ in results[1:])
        padding = [rows for _, _, padding in results for rows in padding.values()]
        assert sum(map(len, padding)) == (tp == 2) * (2 if pp == 2 or "untied" in name else 1)
        assert all((rows == 0).all() for rows in padding), layout_name


def run_gradients(directory: str, tokens: torch.Tensor, weights: torch.Tensor, recompute: str):
    from megatron_opo.actor.model import build_model, output_weight
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(recompute=recompute)
    initialize(actor, seed=0)
    config = json.loads((Path(directory) / "config.json").read_text())
    model = build_model(config, actor, "float32")
    load_hf(model, Path(directory), config)
    hidden = model[0](tokens[None], packed_seq_params=packed_params(LENGTHS))
    (hidden[:, 0] @ output_weight(model[0]).t() * weights).sum().backward()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(parameter.grad)
    return dict(export_hf(model, config, torch.float32))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["qwen3 tied", "llama untied"])
def test_gradients_are_those_of_transformers_in_float64(name, recompute, tmp_path):
    directory = make_model(tmp_path / "model", *MODELS[name])
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),), generator=generator)
    weights = torch.randn(sum(LENGTHS), SHAPE["vocab_size"], generator=generator)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    (reference_logits(reference, tokens) * weights).sum().backward()
    (gradients,) = run_ranks(1, run_gradients, str(directory), tokens, weights, recompute)
    for tensor_name, parameter in reference.named_parameters():
        difference = gradients[tensor_name].double() - parameter.grad
        assert difference.norm() < 1e-5 * parameter.grad.norm(), tensor_name


def run_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_opo.actor.cpu import enable_cpu
    from megatron_opo.actor.norm import RMSNorm

    enable_cpu()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=hidden.dtype
    )
    norm = RMSNorm(config, hidden.shape[-1], eps)
    norm.weight.data.copy_(weight)
    return norm(hidden).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_rounds_like_transformers(dtype):
    hidden = (3 * torch.randn(50, 64)).to(dtype)
    reference = Qwen3RMSNorm(64, eps=1e-4).to(dtype)
    reference.weight.data.normal_(1, 0.3)
    (result,) = run_ranks(1, run_norm, hidden, reference.weight.detach(), 1e-4)
    assert result.dtype == dtype
    torch.testing.assert_close(result, reference(hidden), rtol=1e-6, atol=0)
