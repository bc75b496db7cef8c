"""Is a converted model the same model? Every tensor to the bit, and the logits of both."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import psutil
import torch
import transformers.utils.logging
from transformers import AutoModelForCausalLM

from megatron_opo.actor.probe_logits import probe_logits, round_parameters
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.weights.checkpoint import (
    Checkpoint,
    check_names,
    open_checkpoint,
    read_config,
)
from megatron_opo.weights.families import Architecture
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import MegatronCheckpoint, open_megatron
from megatron_opo.weights.text import shown_size

Say = Callable[[str], None]
PROBE_LENGTHS = (5, 17, 1, 40)
# Of the largest logit: float32 on both sides leaves rounding, which grows with depth; a weight in
# the wrong place changes logits by about their own size.
LOGIT_TOLERANCE = 1e-3
# Bytes a parameter takes in float32, and as much again while it is loaded.
PROBE_BYTES = 8
SHOWN = 5


def check_conversion(
    hf: Path,
    megatron: Path,
    dtype: torch.dtype | None,
    written: str,
    other_config: Path,
    say: Say,
) -> list[str]:
    """What differs between a Hugging Face directory and a Megatron checkpoint; nothing if they are
    the same model.

    Args:
        dtype: what the weights were cast to; None: to what holds the source's without loss.
        written: "hf" or "megatron", the one that was made of the other.
        other_config: directory of the config.json that the Megatron checkpoint goes with.
        say: takes a line about what was compared.
    """
    try:
        config = read_config(hf)
        architecture = read_architecture(config)
        other = read_architecture(read_config(other_config))
        found, must = (architecture, other) if written == "hf" else (other, architecture)
        if problems := list(_different_configs(found, must)):
            return problems
        with ExitStack() as stack:
            left = open_checkpoint(hf, stack)
            check_names(left, architecture.hf_shapes(), architecture.tied)
            right = open_megatron(megatron, architecture)
            problems = list(_different(left, right, dtype, written))
        say(f"verify: {len(right.tensors)} tensors compared, {len(problems)} differ")
        if len(problems) > SHOWN:
            problems[SHOWN:] = [f"... and {len(problems) - SHOWN} more"]
        return problems or _compare_logits(hf, megatron, config, dtype, say)
    except OpoError as error:
        return [str(error)]


def _different_configs(found: Architecture, must: Architecture) -> Iterator[str]:
    for field in fields(Architecture):
        left, right = getattr(found, field.name), getattr(must, field.name)
        if left != right:
            if field.name == "family":
                left, right = left.model_type, right.model_type
            yield f"config.json: {field.name} is {left}, must be {right}"


def _different(
    hf: Checkpoint, megatron: MegatronCheckpoint, dtype: torch.dtype | None, written: str
) -> Iterator[str]:
    for name in megatron.tensors:
        source, found = hf.read(name, None, 0, 0), megatron.read(name, None, 0, 0)
        if written == "hf":
            source, found = found, source
        allowed = dtype or torch.promote_types(source.dtype, found.dtype)
        if found.dtype != allowed:
            yield f"{name}: {found.dtype}, must be {allowed}"
            continue
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[allowed.itemsize]
        differ = (source.to(allowed).view(bits) != found.view(bits)).reshape(-1)
        if differ.any():
            first = int(differ.int().argmax())
            yield (
                f"{name}: {int(differ.sum())} of {differ.numel()} values differ, the first of them "
                f"{found.reshape(-1)[first].item()!r}, must be "
                f"{source.to(allowed).reshape(-1)[first].item()!r}"
            )


def _compare_logits(
    hf: Path, megatron: Path, config: dict, dtype: torch.dtype | None, say: Say
) -> list[str]:
    architecture = read_architecture(config)
    needed = PROBE_BYTES * architecture.parameter_count()
    free = psutil.virtual_memory().available
    if needed > free:
        say(
            f"verify: logits not compared: that takes {shown_size(needed)} of memory, "
            f"{shown_size(free)} are free"
        )
        return []
    lengths = [min(length, architecture.max_positions) for length in PROBE_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, architecture.vocab, (sum(lengths),), generator=generator)
    try:
        expected = _transformers_logits(hf, dtype, tokens, lengths)
        gc.collect()
        found = probe_logits(megatron, config, dtype, tokens, lengths)
    except RecipeError as error:
        say(f"verify: logits not compared: {error}")
        return []
    largest = expected.abs().max().item()
    gap = (found - expected).abs().max().item()
    say(
        f"verify: logits of {len(tokens)} tokens: transformers and Megatron differ by {gap:.1e} at "
        f"most, allowed {LOGIT_TOLERANCE * largest:.1e} ({LOGIT_TOLERANCE:g} of the largest logit)"
    )
    if gap <= LOGIT_TOLERANCE * largest:
        return []
    return [f"the logits of the two models differ by {gap:.2g} where the largest is {largest:.2g}"]


def _transformers_logits(
    directory: Path, dtype: torch.dtype | None, tokens: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """[T, V] in float32, each sequence on its own."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    round_parameters(model, dtype)
    with torch.no_grad():
        return torch.cat([model(part[None]).logits[0] for part in tokens.split(lengths)])
