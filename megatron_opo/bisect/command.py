"""What `tools/logprob_bisect.py` does."""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import load_recipe

DEFAULT_LENGTHS = (1, 17, 64)
EXIT_DIFFERENT = 1
ONE_RANK = (
    "actor.tensor_parallel=1",
    "actor.pipeline_parallel=1",
    "actor.virtual_pipeline=1",
    "actor.context_parallel=1",
    "actor.sequence_parallel=false",
    "actor.expert_parallel=1",
    "actor.expert_tensor_parallel=null",
    "actor.data_parallel=null",
    "rollout.tensor_parallel=1",
    "rollout.servers=1",
    "rollout.urls=[]",
    "rollout.nodes=0",
    "rollout.hand_over_memory=null",
)
ANY_RECIPE = """
name: logprob_bisect
run_dir: {run_dir}
model: {{path: {path}, dtype: float32}}
rollout: {{server_args: {{max_total_tokens: 8192, max_running_requests: 16}}}}
data: {{train: {{files: [none.jsonl]}}}}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--recipe", type=Path, help="YAML file: its model and rollout settings")
    source.add_argument(
        "--model", type=Path, metavar="HF_DIR", help="config.json, *.safetensors, tokenizer files"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="model.dtype of both sides")
    parser.add_argument(
        "--tokens",
        action="append",
        metavar="ID,ID,...",
        help="a prompt; may be given several times (default: three of random tokens)",
    )
    parser.add_argument(
        "--response-tokens", type=int, default=8, metavar="N", help="to sample (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="every number, for programs")


def run(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Record both sides and print what differs; the exit code.

    Raises:
        OpoError: the recipe, the model, the server or the trainer cannot be used.
    """
    import torch

    from megatron_opo.bisect import server_side, trainer_side
    from megatron_opo.bisect.comparison import compare
    from megatron_opo.bisect.operations import operations
    from megatron_opo.rollout import close_servers, wait_healthy
    from megatron_opo.weights.checkpoint import read_config
    from megatron_opo.weights.hf_config import read_architecture

    with tempfile.TemporaryDirectory(prefix="logprob_bisect_") as name:
        scratch = Path(name)
        recipe = resolve(options, scratch)
        directory = Path(recipe.model.path)
        hf_config = read_config(directory)
        architecture = read_architecture(hf_config)
        prompts = prompts_of(options.tokens, architecture.vocab)
        if options.response_tokens < 1:
            raise RecipeError(f"--response-tokens: {options.response_tokens}, must be at least 1")
        wanted = operations(architecture)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        server = server_side.launch(recipe, wanted, scratch, device)
        try:
            wait_healthy([server], recipe.rollout.start_timeout_s)
            asked = server_side.ask(
                server,
                recipe,
                wanted,
                prompts,
                options.response_tokens,
                scratch,
                architecture.vocab,
            )
        finally:
            close_servers([server])  # on a GPU the trainer needs its memory
        with trainer_side.open_job(recipe) as place:
            mine = trainer_side.record(recipe, hf_config, directory, wanted, asked.sequences, place)
        dtype = getattr(torch, recipe.model.dtype)
        found = compare(wanted, asked.recording, mine, asked.sequences, dtype)
    if options.json:
        say(json.dumps(found.as_data(), indent=2))
    else:
        show(found, say)
    return 0 if found.first is None else EXIT_DIFFERENT


def resolve(options: argparse.Namespace, scratch: Path) -> Recipe:
    """The recipe of one server and one rank.

    Raises:
        RecipeError: it has mistakes.
    """
    path = options.recipe
    if path is None:
        path = scratch / "recipe.yaml"
        quoted = json.dumps(str(options.model.resolve()))
        path.write_text(ANY_RECIPE.format(run_dir=json.dumps(str(scratch / "run")), path=quoted))
    dtype = [f"model.dtype={options.dtype}"] if options.dtype else []
    return load_recipe(path, [*options.overrides, *dtype, *ONE_RANK])


def prompts_of(given: Sequence[str] | None, vocab: int) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        RecipeError: what is no token of the model.
    """
    if not given:
        draw = random.Random(0)
        return [[draw.randrange(vocab) for _ in range(length)] for length in DEFAULT_LENGTHS]
    prompts = []
    for text in given:
        words = text.split(",")
        if not all(word.strip().isdecimal() and int(word) < vocab for word in words):
            raise RecipeError(
                f"--tokens {text}: must be ids from 0 to {vocab - 1} with commas between them, as "
                "--tokens 12,7,99"
            )
        prompts.append([int(word) for word in words])
    return prompts


def show(found: Any, say: Callable[[str], None]) -> None:
    """A table of all operations, and the verdict."""
    from megatron_opo.bisect.comparison import verdict

    width = max(len(line.operation.title) for line in found.lines)
    cells = f"{'equal':>8} {'largest':>9} {'relative':>9}"
    say(f"{'':{width}}  {'prefill':^28}  {'decode':^28}")
    say(f"{'operation':{width}}  {cells}  {cells}")
    for line in found.lines:
        mark = "  <- first" if line is found.first else ""
        parts = [line.problem] if line.problem else [_cells(line.prefill), _cells(line.decode)]
        say(f"{line.operation.title:{width}}  {'  '.join(parts)}{mark}")
    say("")
    say(verdict(found))


def _cells(part: Any) -> str:
    if part is None:
        return f"{'-':>8} {'-':>9} {'-':>9}"
    # Rounded down: what is not equal must not look so.
    percent = int(part.equal * 1000) / 10
    return f"{percent:>7.1f}% {part.largest:>9.1e} {part.relative:>9.1e}"
