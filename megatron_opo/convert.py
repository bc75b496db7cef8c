"""Models from Hugging Face directories to Megatron checkpoints and back: what the tools do."""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_opo.checkpoint_source import HF, find_checkpoint
from megatron_opo.errors import CheckpointError, OpoError, WeightError
from megatron_opo.weights.checkpoint import read_config
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import hf_tensors, open_megatron
from megatron_opo.weights.megatron_save import save_megatron
from megatron_opo.weights.memory import is_shortage
from megatron_opo.weights.new_directory import check_target
from megatron_opo.weights.save import save_hf
from megatron_opo.weights.streaming import OnProgress
from megatron_opo.weights.text import shown_size

AS_SAVED = "as-saved"
DTYPES: dict[str, torch.dtype | None] = {
    AS_SAVED: None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
BUFFER_BYTES = 2**27
LINE_EVERY_S = 10.0
EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_BUG = 3
EXIT_INTERRUPTED = 130
TOO_LITTLE_MEMORY = "the system gave too little memory (or threads); free some, and try again"


def hf_to_megatron(
    source: Path, target: Path, *, dtype: torch.dtype | None, threads: int, verify: bool
) -> int:
    """Convert, show progress, and compare if asked; returns the exit code.

    Raises:
        RecipeError, WeightError, CheckpointError: nothing was written.
    """
    with shown_progress(f"{source} -> {target}") as on_progress:
        save_megatron(target, source, dtype=dtype, threads=threads, on_progress=on_progress)
    print(f"wrote {target}: Megatron loads it in any layout", flush=True)
    return _verdict(source, target, dtype, "megatron", target / HF) if verify else 0


def megatron_to_hf(
    path: Path,
    target: Path,
    *,
    model: Path | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    verify: bool,
) -> int:
    """Convert, show progress, and compare if asked; returns the exit code.

    Args:
        path: anything that `find_checkpoint` understands.
        model: Hugging Face directory with config and tokenizer; None finds it by the checkpoint.

    Raises:
        RecipeError, WeightError, CheckpointError: nothing was written.
    """
    check_target(target)
    found = find_checkpoint(path)
    model = model or found.model
    if model is None:
        raise CheckpointError(
            f"{found.checkpoint} does not say which model it holds: name a directory with its "
            "config.json and tokenizer by --hf-config"
        )
    if not model.is_dir():
        what = "is a file" if model.is_file() else "does not exist here"
        raise CheckpointError(
            f"the model directory of {found.checkpoint} is {model}, which {what}: "
            "name one with the same config.json and tokenizer by --hf-config"
        )
    checkpoint = open_megatron(found.checkpoint, read_architecture(read_config(model)))
    dtype = dtype or _only_dtype({checkpoint.dtype(name) for name in checkpoint.tensors})
    with (
        shown_progress(f"{found.checkpoint} -> {target}") as on_progress,
        closing(hf_tensors(checkpoint, dtype)) as weights,
    ):
        save_hf(
            target,
            weights,
            source=model,
            max_shard_bytes=max_shard_bytes,
            buffer_bytes=BUFFER_BYTES,
            on_progress=on_progress,
        )
    print(f"wrote {target}: a Hugging Face model in {_name(dtype)}", flush=True)
    return _verdict(target, found.checkpoint, dtype, "hf", model) if verify else 0


def _only_dtype(found: set[torch.dtype]) -> torch.dtype:
    if len(found) > 1:
        names = " and ".join(sorted(map(_name, found)))
        raise WeightError(f"the checkpoint's weights are in {names}: choose one by --dtype")
    return found.pop()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _verdict(
    hf: Path, megatron: Path, dtype: torch.dtype | None, written: str, other_config: Path
) -> int:
    target = hf if written == "hf" else megatron
    quit_on_interrupt(f"interrupted: {target} is written whole, but not verified\n")
    # Megatron's own warnings, about what a user can do nothing about.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\b")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    try:
        from megatron_opo.convert_check import check_conversion

        problems = check_conversion(
            hf, megatron, dtype, written, other_config, lambda line: print(line, flush=True)
        )
    except Exception as error:
        if not is_shortage(error):
            raise
        print(
            f"error: {target} is written whole, but not verified: {TOO_LITTLE_MEMORY}",
            file=sys.stderr,
        )
        return EXIT_ERROR
    for problem in problems:
        print(f"  {printable(problem)}")
    print("verify: DIFFERENT" if problems else "verify: the same model", flush=True)
    return EXIT_DIFFERENT if problems else 0


@contextmanager
def shown_progress(title: str) -> Iterator[OnProgress]:
    """A bar with rate and time left on a terminal; elsewhere a line every ten seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Lines:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def __call__(self, bytes_done: int, bytes_total: int, /) -> None:
        now = time.monotonic()
        if now - self._last < LINE_EVERY_S and bytes_done < bytes_total:
            return
        self._last = now
        rate = bytes_done / max(now - self._start, 1e-9)
        left = (bytes_total - bytes_done) / max(rate, 1.0)
        print(
            f"{shown_size(bytes_done)} of {shown_size(bytes_total)}, {rate / 1e6:.0f} MB/s, "
            f"{left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def printable(text: str) -> str:
    """Lines without what a terminal would act on, or what no encoding can show."""
    return "".join(
        each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text
    )


def quit_on_interrupt(message: str = "") -> None:
    """From now on Ctrl-C ends the process at once, also where a library would catch or hide it:
    for times when there is nothing to clean up."""

    def quit(*_: object) -> None:
        os.write(sys.stderr.fileno(), message.encode())
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, quit)


def exit_with(work: Callable[[], int], name: str = "converter") -> None:
    """Run and exit; errors meant for the user are shown without a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = work()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted; nothing was left behind", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        code = _show(error, name)
    sys.exit(code)


def _show(error: Exception, name: str) -> int:
    if isinstance(error, OpoError):
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_ERROR
    if is_shortage(error):
        print(f"error: {TOO_LITTLE_MEMORY}; nothing was left behind", file=sys.stderr)
        return EXIT_ERROR
    traceback.print_exception(error)
    print(f"this is a bug in the {name}; please report it", file=sys.stderr)
    return EXIT_BUG
