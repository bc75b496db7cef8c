"""Logits of a Megatron checkpoint, by Megatron's own loading into its own model, in one process."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from torch.distributed.checkpoint.api import CheckpointException

from megatron_opo.actor.model import PackedGPTModel, build_model, output_weight
from megatron_opo.actor.parallel import initialize, shutdown
from megatron_opo.errors import WeightError
from megatron_opo.recipe import ActorConfig
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import open_megatron
from megatron_opo.weights.memory import is_shortage


def probe_logits(
    checkpoint: Path,
    hf_config: dict[str, Any],
    dtype: torch.dtype | None,
    tokens: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """[T, V] float32 of sequences packed one after another, computed in float32.

    Starts a job of one process, and ends it.

    Args:
        dtype: what the weights are rounded to before; None leaves them.
        tokens: [T] ids, T the sum of `lengths`.

    Raises:
        RecipeError: no such model can be built (yet).
        CheckpointError, WeightError: the checkpoint is damaged, or Megatron cannot load it.
    """
    parallel = initialize(ActorConfig(), seed=0)
    try:
        (model,) = build_model(hf_config, ActorConfig(), "float32")
        _load(model, checkpoint, hf_config)
        round_parameters(model, dtype)
        cu_seqlens = torch.tensor([0, *lengths], device=parallel.device).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        with torch.no_grad():
            hidden = model(tokens[None].to(parallel.device), packed_seq_params=packed)
            logits = hidden[:, 0] @ output_weight(model).t()
        return logits[:, : model.hf_vocab_size].float().cpu()
    finally:
        shutdown()


def round_parameters(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Give each parameter the values that it has in `dtype`, in its own."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(dtype or parameter.dtype))


def _load(model: PackedGPTModel, checkpoint: Path, hf_config: dict[str, Any]) -> None:
    per_layer = open_megatron(checkpoint, read_architecture(hf_config)).per_layer
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": per_layer})
    # Tensors only: what modules keep besides is pickled, and would be run.
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    try:
        loaded: Any = dist_checkpointing.load({"model": tensors}, str(checkpoint))
    # The latter is no Exception.
    except (Exception, CheckpointException) as error:
        if is_shortage(error):
            raise
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise WeightError(
            f"checkpoint {checkpoint}: Megatron cannot load it ({type(error).__name__}: {reason})"
        ) from error
    missing, _ = model.load_state_dict(loaded["model"], strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing:
        raise WeightError(f"checkpoint {checkpoint}: Megatron finds no {', '.join(missing)} in it")
