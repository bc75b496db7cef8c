"""Which weights `--checkpoint` means, and a Hugging Face directory with them."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_opo.checkpoint_source import find_checkpoint
from megatron_opo.errors import CheckpointError, RecipeError
from megatron_opo.recipe import Recipe
from megatron_opo.runs import CHECKPOINTS, EXPORTS, complete_checkpoints, step_of
from megatron_opo.weights.checkpoint import check_names, open_checkpoint, read_config
from megatron_opo.weights.hf_config import read_architecture

SHARD_BYTES = 5 * 10**9
STEP_DIRECTORY = re.compile(r"step_\d+")


@dataclass(frozen=True)
class Source:
    """`path` is a Hugging Face directory, or else a Megatron checkpoint (`is_megatron`). `run` is
    the run that it belongs to, if to any; `name` is its own."""

    name: str
    path: Path
    is_megatron: bool = False
    run: Path | None = None

    def default_out(self, recipe: Recipe) -> Path:
        """Where its evaluation goes: into its run, or that of the recipe."""
        return (self.run or recipe.run_path) / "eval" / self.name


def find_source(asked: str | None, recipe: Recipe) -> Source:
    """
    Args:
        asked: DIR_OR_RUN[:STEP]; None: what the recipe starts from.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path, step = _parse(asked or recipe.model.megatron_checkpoint or recipe.model.path)
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise CheckpointError(
            f"checkpoint {path} {what}: give a Hugging Face model directory, or a run directory "
            "(RUN, or RUN:STEP)"
        )
    if (path / "config.json").is_file():
        _refuse_step(path, step, "a Hugging Face model directory")
        return Source(_name(path), path, run=_run_of(path, EXPORTS))
    exported, saved = _exported(path), {step_of(each): each for each in complete_checkpoints(path)}
    if not exported and not saved:
        _refuse_step(path, step, "no run directory with checkpoints")
        found = find_checkpoint(path).checkpoint
        return Source(_name(found), found, is_megatron=True, run=_run_of(found, CHECKPOINTS))
    steps = sorted(exported | saved)
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise CheckpointError(
            f"run {path} has nothing of step {chosen}; it has steps {', '.join(map(str, steps))}"
        )
    if chosen in exported:
        return Source(f"step_{chosen}", exported[chosen], run=path)
    return Source(f"step_{chosen}", saved[chosen], is_megatron=True, run=path)


def _parse(asked: str) -> tuple[Path, int | None]:
    path, colon, step = asked.rpartition(":")
    if not colon or Path(asked).exists():
        return Path(asked), None
    if not re.fullmatch(r"\d{1,9}", step):
        raise CheckpointError(
            f"checkpoint {asked}: {step!r} is no step; write RUN:STEP, such as runs/my_run:60"
        )
    return Path(path), int(step)


def _refuse_step(path: Path, step: int | None, what: str) -> None:
    if step is not None:
        raise CheckpointError(f"checkpoint {path}:{step}: {path} is {what}; drop :{step}")


def _exported(run: Path) -> dict[int, Path]:
    # A model that was written again lies there as step_N, the one before as step_N.TIME.
    return {
        step_of(path): path
        for path in (run / EXPORTS).glob("step_*")
        if STEP_DIRECTORY.fullmatch(path.name) and (path / "config.json").is_file()
    }


def _name(path: Path) -> str:
    return path.resolve().name


def _run_of(path: Path, kind: str) -> Path | None:
    path = path.resolve()
    is_of_run = path.parent.name == kind and STEP_DIRECTORY.fullmatch(path.name)
    return path.parent.parent if is_of_run else None


@contextmanager
def hugging_face(source: Source, recipe: Recipe, scratch: Path) -> Iterator[Path]:
    """A Hugging Face directory of it: its own, or one in `scratch` until the end of the block.

    Raises:
        RecipeError, WeightError, CheckpointError: it cannot be converted.
    """
    if not source.is_megatron:
        yield source.path
        return
    from megatron_opo.convert import megatron_to_hf

    stated = find_checkpoint(source.path).model
    model = stated if stated is not None and stated.is_dir() else Path(recipe.model.path)
    with TemporaryDirectory(prefix="model_", dir=scratch) as directory:
        target = Path(directory) / source.name
        with redirect_stdout(sys.stderr):
            megatron_to_hf(
                source.path,
                target,
                model=model,
                dtype=getattr(torch, recipe.model.dtype),
                max_shard_bytes=SHARD_BYTES,
                verify=False,
            )
        yield target


def stored_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of every weight that servers are given.

    Raises:
        RecipeError: the model is not supported.
        WeightError: the files do not fit its config.json, or cannot be read.
    """
    architecture = read_architecture(read_config(directory))
    shapes = {p.name: architecture.shape(p) for row in architecture.rows() for p in row.parts}
    with ExitStack() as stack:
        checkpoint = open_checkpoint(directory, stack)
        check_names(checkpoint, shapes, architecture.tied)
        for name in shapes:
            yield name, checkpoint.read(name, None, 0, 0)


def as_evaluated(recipe: Recipe, directory: Path, samples: int) -> Recipe:
    """The recipe with these weights and so many samples of each prompt, and without a trainer: what
    its actor could hold is no limit here.

    Raises:
        RecipeError: it has no evaluation data.
    """
    if recipe.data.eval is None:
        raise RecipeError(
            "data.eval names no dataset, so there is nothing to evaluate on: add it to the recipe, "
            "or give 'data.eval={files: [test.jsonl]}'"
        )
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(
                update={"path": str(directory), "megatron_checkpoint": None}
            ),
            "rollout": recipe.rollout.model_copy(update={"hand_over_memory": False}),
            "eval": recipe.eval.model_copy(update={"samples_per_prompt": samples}),
            "actor": type(recipe.actor)(micro_batch_tokens=longest),
        }
    )
