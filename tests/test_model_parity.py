"""The Megatron model against transformers: logits and gradients, in every layout, both ways."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
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
    "TP4, more ranks than key-value heads": {"tensor_parallel": 4},
}
# A vocabulary that ranks cannot share evenly; grouped queries; heads wider than hidden / heads.
SHAPE = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Original contexts so short that the tests' sequences reach every branch of the formulas.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6}


@dataclass(frozen=True)
class Model:
    """`max_tp` is what the number of heads allows."""

    cls: type
    tied: bool
    changes: dict = field(default_factory=dict)
    max_tp: int = 4


MODELS = {
    "qwen3 tied": Model(Qwen3Config, True),
    "qwen3 untied": Model(Qwen3Config, False),
    "qwen3 yarn": Model(Qwen3Config, True, {"rope_parameters": YARN}),
    "llama2": Model(LlamaConfig, False),
    "llama3": Model(LlamaConfig, False, {"rope_parameters": LLAMA3}),
    "llama linear": Model(LlamaConfig, True, {"rope_parameters": LINEAR}),
    "llama one key-value head": Model(LlamaConfig, False, {"num_key_value_heads": 1}),
    "smollm2": Model(
        LlamaConfig,
        True,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
        max_tp=1,
    ),
    "qwen2": Model(Qwen2Config, False),
    "qwen2 tied": Model(Qwen2Config, True),
    "qwen2 sliding from layer 1": Model(Qwen2Config, False, SLIDING | {"max_window_layers": 1}),
    "mistral sliding": Model(MistralConfig, False, {"sliding_window": 7}),
    "mistral": Model(MistralConfig, False, {"sliding_window": None}),
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


def run_models(directories: list[str], tokens: torch.Tensor, layout: dict) -> list[tuple]:
    """On a rank, for each model: load it, compute logits, export it; (logits, export), where they
    are whole, and its padding rows."""
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig

    actor = ActorConfig(**layout)
    parallel = initialize(actor, seed=0)
    return [run_model(Path(each), tokens, actor, parallel) for each in directories]


def run_model(directory: Path, tokens: torch.Tensor, actor, parallel) -> tuple:
    from megatron_opo.actor.model import build_model
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    config = json.loads((directory / "config.json").read_text())
    model = build_model(config, actor, "float32")
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(torch.nan)
    load_hf(model, directory, config)
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


@dataclass(frozen=True)
class Reference:
    directory: Path
    names: list[str]
    stored: dict[str, torch.Tensor]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),), generator=generator)


@pytest.fixture(scope="module")
def references(tokens, tmp_path_factory) -> dict[str, Reference]:
    found = {}
    for name, spec in MODELS.items():
        path = tmp_path_factory.mktemp("models") / "model"
        directory = make_model(path, spec.cls, spec.tied, **spec.changes)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            logits = reference_logits(model, tokens)
        stored = load_file(directory / "model.safetensors")
        found[name] = Reference(directory, [*model.state_dict()], stored, logits)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_gives_the_logits_of_transformers_and_the_same_weights_back(
    layout, references, tokens
):
    tp, pp = (LAYOUTS[layout].get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline"))
    fitting = [name for name, spec in MODELS.items() if spec.max_tp >= tp]
    directories = [str(references[name].directory) for name in fitting]
    results = run_ranks(tp * pp, run_models, directories, tokens, LAYOUTS[layout])
    for name, ranks in zip(fitting, zip(*results, strict=True), strict=True):
        reference = references[name]
        logits = [logits for logits, _, _ in ranks if logits is not None]
        assert len(logits) == tp, name
        gap = max((each - reference.logits).abs().max().item() for each in logits)
        print(f"{name}, {layout}: largest logit difference {gap:.1e}")
        assert gap < 5e-5, name
        exported = ranks[0][1]
        # In the order of transformers, but that biases follow all weights of the attention.
        weights = [each for each in exported if not each.endswith(".bias")]
        order = [each for each in reference.names if not each.endswith(".bias")]
        assert weights == order[: len(weights)], name
        assert exported.keys() == reference.stored.keys(), name
        for tensor_name, tensor in exported.items():
            assert torch.equal(tensor, reference.stored[tensor_name]), f"{name}: {tensor_name}"
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, tensor_name
        assert all(not other for _, other, _ in ranks[1:])
        padding = [rows for _, _, padding in ranks for rows in padding.values()]
        copies = 2 if pp == 2 or not MODELS[name].tied else 1
        assert sum(map(len, padding)) == (copies if tp > 1 else 0), name
        assert all((rows == 0).all() for rows in padding), name


def run_gradients(
    directories: list[str], tokens: torch.Tensor, weights: torch.Tensor, layout: dict
) -> list[dict[str, torch.Tensor]]:
    from megatron.core import tensor_parallel

    from megatron_opo.actor.model import build_model, output_weight
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.recipe import ActorConfig
    from megatron_opo.weights.export import export_hf
    from megatron_opo.weights.load import load_hf

    actor = ActorConfig(**layout)
    parallel = initialize(actor, seed=0)
    gradients = []
    for directory in map(Path, directories):
        config = json.loads((directory / "config.json").read_text())
        model = build_model(config, actor, "float32")
        load_hf(model, directory, config)
        hidden = model[0](tokens[None], packed_seq_params=packed_params(LENGTHS))
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden[:, 0])
        rows = output_weight(model[0])
        columns = torch.nn.functional.pad(weights, (0, len(rows) * parallel.tp_size))
        first = len(rows) * parallel.tp_rank
        (hidden @ rows.t() * columns[:, first : first + len(rows)]).sum().backward()
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.copy_(parameter.grad)
        gradients.append(dict(export_hf(model, config, torch.float32)))
    return gradients


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({}, ["qwen3 tied", "qwen3 yarn", "llama3", "qwen2", "mistral sliding"]),
        ({"recompute": "full"}, ["qwen3 tied", "llama2", "qwen2 sliding from layer 1"]),
        ({"tensor_parallel": 4}, ["qwen2", "llama one key-value head"]),
    ],
    ids=["TP1", "recompute", "TP4"],
)
def test_gradients_are_those_of_transformers_in_float64(layout, names, references, tokens):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(sum(LENGTHS), SHAPE["vocab_size"], generator=generator)
    directories = [str(references[name].directory) for name in names]
    tp = layout.get("tensor_parallel", 1)
    results = run_ranks(tp, run_gradients, directories, tokens, weights, layout)[0]
    for name, gradients in zip(names, results, strict=True):
        directory = references[name].directory
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        (reference_logits(reference, tokens) * weights).sum().backward()
        for tensor_name, parameter in reference.named_parameters():
            difference = gradients[tensor_name].double() - parameter.grad
            bound = 1e-5 * parameter.grad.norm()
            assert difference.norm() < bound, f"{name}: {tensor_name}"


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
