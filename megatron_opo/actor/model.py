"""The Megatron GPT model of a Hugging Face config."""

import dataclasses
import difflib
import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_opo.actor.attention import PackedAttention
from megatron_opo.actor.experts import (
    Router,
    expert_fields,
    has_transformer_engine,
    layers_with_experts,
    mark_experts,
    router_of,
    use_router,
)
from megatron_opo.actor.norm import RMSNorm
from megatron_opo.actor.rope import inverse_frequencies, token_angles
from megatron_opo.errors import RecipeError
from megatron_opo.model_fit import training_problems
from megatron_opo.recipe import ActorConfig
from megatron_opo.weights.families import Architecture
from megatron_opo.weights.hf_config import read_architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PackedGPTModel(GPTModel):
    """A GPTModel over packed sequences whose last stage returns hidden states, never logits.

    `hf_vocab_size` is the vocabulary without the rows that make it divisible by tensor_parallel,
    `rotary_frequencies` those of `rope.inverse_frequencies`.
    """

    hf_vocab_size: int
    rotary_frequencies: torch.Tensor

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """Hidden states, after the final norm on the last pipeline stage.

        Args:
            input_ids: [1, T / cp], of this context-parallel rank, in the order of
                `packing.rows_of`.
            position_ids: unused; each sequence's positions count from 0, by its own length.
            attention_mask: unused; causal within each sequence.
            packed_seq_params: qkv_format "thd", cu_seqlens [N+1] int32 from 0 to T.

        Returns:
            [T / cp, 1, H], or this rank's [T / cp / tp, 1, H] under sequence parallelism (T / cp
            must be a multiple of tensor_parallel then).
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=None)
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._angles(packed_seq_params.cu_seqlens_q),
            packed_seq_params=packed_seq_params,
        )

    def _angles(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[T, 1, 1, D]: one row per token, which Megatron applies in one go; given a table by
        position it would go through the sequences one by one."""
        self.rotary_frequencies = self.rotary_frequencies.to(cu_seqlens.device)
        return token_angles(self.rotary_frequencies, cu_seqlens)


def build_model(hf_config: dict[str, Any], actor: ActorConfig, dtype: str) -> list[PackedGPTModel]:
    """This rank's part of the model, one module per virtual pipeline chunk.

    Parameters are not initialised: `weights.load_hf` fills them.

    Raises:
        RecipeError: the config, the layout or a transformer_config field cannot work.
    """
    architecture = read_architecture(hf_config)
    config = transformer_config(hf_config, actor, dtype)
    chunks = actor.virtual_pipeline
    return [
        _build_chunk(architecture, config, actor, chunk if chunks > 1 else None)
        for chunk in range(chunks)
    ]


def _build_chunk(
    architecture: Architecture, config: TransformerConfig, actor: ActorConfig, chunk: int | None
) -> PackedGPTModel:
    """`chunk` is None where stages are not cut into chunks."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    is_last_chunk = chunk in (None, actor.virtual_pipeline - 1)
    model = PackedGPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, chunk, router_of(architecture)),  # pyright: ignore[reportArgumentType]
        vocab_size=padded_vocab(architecture.vocab, actor.tensor_parallel),
        max_sequence_length=architecture.max_positions,
        pre_process=stage == 0 and not chunk,
        post_process=stage == actor.pipeline_parallel - 1 and is_last_chunk,
        share_embeddings_and_output_weights=architecture.tied,
        # The angles are our own (PackedGPTModel.forward).
        position_embedding_type="none",
        vp_stage=chunk,
    )
    model.hf_vocab_size = architecture.vocab
    model.rotary_frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
    _mark_split_parameters(model)
    mark_experts(model)
    return model


def _mark_split_parameters(model: torch.nn.Module) -> None:
    """Megatron marks them only where it initialises them. Without the marks it takes the slices of
    all tensor-parallel ranks but the first for copies, and leaves them out of the gradient norm."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        # Newer Megatron versions mark them in any case, and refuse a second mark.
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dim, stride=1)


def padded_vocab(vocab: int, tensor_parallel: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks; those past `vocab` are zero."""
    return -(-vocab // tensor_parallel) * tensor_parallel


def output_weight(model: PackedGPTModel) -> torch.Tensor:
    """[V_padded / tp, H]: the rows of the output layer on this rank; last pipeline stage only."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight  # pyright: ignore[reportReturnType]


def transformer_config(
    hf_config: dict[str, Any], actor: ActorConfig, dtype: str
) -> TransformerConfig:
    """Megatron's config for this model, layout and dtype, with `actor.transformer_config` on top.

    Raises:
        RecipeError: unknown or reserved fields, sizes that do not divide, or a combination that
            Megatron refuses.
    """
    architecture = read_architecture(hf_config)
    if dtype not in DTYPES:
        raise RecipeError(f"model.dtype: {dtype!r}; allowed: {', '.join(DTYPES)}")
    if problems := training_problems(architecture, actor):
        raise RecipeError("\n".join(problems))
    fixed = _fixed_fields(architecture, actor, DTYPES[dtype])
    _check_extra(actor.transformer_config, fixed)
    fields = {**_default_fields(actor), **fixed, **actor.transformer_config}
    try:
        return TransformerConfig(**fields)
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(
            f"actor.transformer_config: Megatron-Core refuses {actor.transformer_config}: {error}"
        ) from error


def _fixed_fields(
    architecture: Architecture, actor: ActorConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """What the model, the layout and exactness decide; a recipe cannot override these."""
    window = next((each for each in architecture.windows if each is not None), None)
    return {
        "num_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": architecture.ffn,
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.kv_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.family.qk_norm,
        "add_qkv_bias": architecture.family.qkv_bias,
        # Queries and keys that both grow by a factor are scores that grow by its square.
        "softmax_scale": architecture.rope.attention_factor**2 / math.sqrt(architecture.head_dim),
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": [int(each is not None) for each in architecture.windows],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": actor.tensor_parallel,
        "context_parallel_size": actor.context_parallel,
        "pipeline_model_parallel_size": actor.pipeline_parallel,
        **_chunk_fields(actor),
        "sequence_parallel": actor.sequence_parallel,
        "variable_seq_lengths": True,
        "perform_initialization": False,
        # Our angles are one row per token; the fused kernel wants a table by position.
        "apply_rope_fusion": False,
        **expert_fields(architecture, actor),
    }


def _chunk_fields(actor: ActorConfig) -> dict[str, Any]:
    if actor.virtual_pipeline == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": actor.virtual_pipeline,
        # One batch of messages both ways would mix them up where two stages are each other's
        # neighbours on both sides.
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _default_fields(actor: ActorConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "gradient_accumulation_fusion": _has_fused_gradient_accumulation(),
        "persist_layer_norm": False,
        # Megatron demands this one with variable_seq_lengths, also without experts.
        "moe_token_dispatcher_type": "alltoall",
    }
    if actor.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return fields


def _has_fused_gradient_accumulation() -> bool:
    return torch.cuda.is_available() and (
        importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def _check_extra(extra: dict[str, Any], fixed: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    problems = []
    for name in extra:
        if name in fixed:
            problems.append(
                f"actor.transformer_config.{name}: set by the model or by another field of the "
                "recipe (actor.tensor_parallel, actor.sequence_parallel, model.dtype, ...); drop it"
            )
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean `{close[0]}`?" if close else "see Megatron's TransformerConfig"
            problems.append(
                f"actor.transformer_config.{name}: TransformerConfig has no such field; {hint}"
            )
    if problems:
        raise RecipeError("\n".join(problems))


def _block_spec(
    config: TransformerConfig, chunk: int | None, router: type[Router]
) -> TransformerBlockSubmodules:
    sparse = layers_with_experts(config)
    if has_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
        first = get_transformer_layer_offset(config, vp_stage=chunk)
        for i, layer in enumerate(block.layer_specs or []):
            if sparse[first + i]:
                use_router(layer, router)
            # Transformer Engine passes keys around among context-parallel ranks, but with a window.
            if config.context_parallel_size > 1 and config.window_size is not None:
                of_layer: Any = layer.submodules
                of_layer.self_attention.submodules.core_attention = PackedAttention
        return block
    kinds = {
        has_experts: _local_layer_spec(config, router if has_experts else None)
        for has_experts in {*sparse}
    }
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[has_experts] for has_experts in sparse[first : first + count]],
        layer_norm=RMSNorm,  # pyright: ignore[reportArgumentType]
    )


def _local_layer_spec(config: TransformerConfig, router: type[Router] | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if router else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    submodules: Any = layer.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if router:
        use_router(layer, router)
    return layer
