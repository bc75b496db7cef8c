"""The trainer's model on one rank, as the actor has it, given the same tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_opo.actor.logprobs import token_logprobs
from megatron_opo.actor.model import PackedGPTModel, build_model, output_weight
from megatron_opo.actor.packing import make_micro_batch
from megatron_opo.actor.parallel import initialize, shutdown
from megatron_opo.actor.server_operations import use_server_operations
from megatron_opo.batch import PackedBatch
from megatron_opo.bisect.operations import LOGITS, LOGPROB, Operation
from megatron_opo.bisect.recording import Recording, Sequences
from megatron_opo.recipe import Recipe
from megatron_opo.weights.load import load_hf

Calls = dict[str, dict[str, torch.Tensor]]


@contextmanager
def open_job(recipe: Recipe) -> Iterator[torch.device]:
    """A job of one process; its device."""
    parallel = initialize(recipe.actor, seed=0)
    try:
        yield parallel.device
    finally:
        shutdown()


def record(
    recipe: Recipe,
    hf_config: dict[str, Any],
    directory: Path,
    wanted: Sequence[Operation],
    sequences: Sequences,
    device: torch.device,
) -> Recording:
    """Build the model in an open job, load it, and compute all sequences as one packed batch.

    Args:
        directory: of the weights.

    Raises:
        RecipeError: no such model can be built.
        WeightError, CheckpointError: the weights do not fit it.
    """
    (model,) = build_model(hf_config, recipe.actor, recipe.model.dtype)
    load_hf([model], directory, hf_config)
    as_server = device.type == "cpu" and recipe.rollout.is_deterministic("cpu")
    if as_server:
        use_server_operations(model)
    batch = _pack(sequences)
    micro_batch = make_micro_batch(batch, list(range(batch.num_sequences)))
    modules = {each.trainer.module for each in wanted if each.trainer}
    with torch.no_grad(), recorded(model, modules) as calls:
        hidden = model(
            micro_batch.tokens[None].to(device),
            packed_seq_params=micro_batch.packed_seq_params(device),
        )
        rows = hidden[micro_batch.rows.to(device), 0]
        weight = output_weight(model)
        logits = (rows @ weight.t())[:, : model.hf_vocab_size].cpu()
        scores = token_logprobs(
            rows,
            weight,
            micro_batch.targets.to(device),
            temperature=recipe.rollout.temperature,
            vocab_size=model.hf_vocab_size,
            chunk_tokens=recipe.actor.logprob_chunk_tokens,
            whole=as_server,
        )
    computed = _computed_rows(batch)
    found = {
        operation.title: values[computed]
        for operation in wanted
        if (values := _values(operation, calls, batch.tokens.numel())) is not None
    }
    return found | {LOGITS: logits, LOGPROB: scores.logprobs[:, None].cpu()}


def _pack(sequences: Sequences) -> PackedBatch:
    """One after the other, as the actor is given them."""
    whole = [p + r for p, r in zip(sequences.prompts, sequences.responses, strict=True)]
    mask = [
        value
        for p, r in zip(sequences.prompts, sequences.responses, strict=True)
        for value in [False] * len(p) + [True] * len(r)
    ]
    count = len(whole)
    lengths = torch.tensor([0, *map(len, whole)])
    zeros = torch.zeros(len(mask))
    return PackedBatch(
        tokens=torch.tensor([token for each in whole for token in each]),
        loss_mask=torch.tensor(mask),
        rollout_logprobs=zeros,
        advantages=zeros,
        cu_seqlens=lengths.cumsum(0),
        group_offsets=torch.arange(count + 1),
        rewards=torch.zeros(count).double(),
        sample_ids=torch.arange(count),
    )


def _computed_rows(batch: PackedBatch) -> torch.Tensor:
    """All but the last of each sequence."""
    keep = torch.ones(batch.tokens.numel(), dtype=torch.bool)
    keep[batch.cu_seqlens[1:] - 1] = False
    return keep.nonzero()[:, 0]


@contextmanager
def recorded(model: PackedGPTModel, names: set[str]) -> Iterator[Calls]:
    """Of each module its tensors in the one pass that is made meanwhile."""
    calls: Calls = defaultdict(dict)
    handles = []
    modules = dict(model.named_modules())
    for name in sorted(names & set(modules)):
        handles.append(modules[name].register_forward_hook(_hook(calls[name], modules[name])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _hook(call: dict[str, torch.Tensor], module: torch.nn.Module) -> Callable:
    def hook(_module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = {f"in{i}": each for i, each in enumerate(_tensors(inputs))}
        # With Transformer Engine a norm is part of the product after it, and nothing in its place.
        if type(module).__name__ != "IdentityOp":
            tensors |= {f"out{i}": each for i, each in enumerate(_tensors(output))}
        call.update(tensors)

    return hook


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values.detach().to("cpu", copy=True)]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _values(operation: Operation, calls: Calls, tokens: int) -> torch.Tensor | None:
    place = operation.trainer
    if place is None:
        return None
    values = calls.get(place.module, {}).get(f"{place.side}{place.index}")
    if values is None:
        return None
    values = values.reshape(tokens, -1)
    return values if place.arrange is None else place.arrange(values)
