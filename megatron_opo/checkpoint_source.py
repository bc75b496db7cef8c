"""Which Megatron checkpoint a path means, and which Hugging Face model it belongs to; found without
Megatron and torch."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_opo.errors import CheckpointError
from megatron_opo.runs import CHECKPOINTS, STATE_FILE, complete_checkpoints

FORMAT_FILE = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
HF = "hf"
ALLOWED = (
    f"a run directory or one of its {CHECKPOINTS}/step_N, what convert_hf_to_megatron.py wrote, or "
    f"a Megatron-LM directory (with {TRACKER}) of format torch_dist"
)


@dataclass(frozen=True)
class CheckpointSource:
    """`model` holds config.json and tokenizer; None where the checkpoint does not say."""

    checkpoint: Path
    model: Path | None


def find_checkpoint(path: Path) -> CheckpointSource:
    """Resolve a path to the checkpoint it means: a run directory to its newest complete one.

    Raises:
        CheckpointError: there is none, or what says where it is cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give {ALLOWED}")
    if (path / CHECKPOINTS).is_dir():
        complete = complete_checkpoints(path)
        if not complete:
            raise CheckpointError(
                f"{path / CHECKPOINTS} has no complete checkpoint (one with a {STATE_FILE})"
            )
        path = complete[-1]
    elif (path / TRACKER).is_file():
        path = _newest_iteration(path)
    if not (path / FORMAT_FILE).is_file():
        raise CheckpointError(f"{path} holds no {FORMAT_FILE}; give {ALLOWED}")
    if (path / STATE_FILE).is_file():
        return CheckpointSource(path, _model_of_run(path / STATE_FILE))
    converted = (path / HF / "config.json").is_file()
    return CheckpointSource(path, path / HF if converted else None)


def _newest_iteration(path: Path) -> Path:
    tracker = path / TRACKER
    try:
        found = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{tracker} cannot be read: {error}") from None
    if found == "release":
        return path / found
    if not re.fullmatch(r"\d{1,9}", found):
        raise CheckpointError(f"{tracker} holds {found!r:.40}; allowed: a number, or `release`")
    return path / f"iter_{int(found):07d}"


def _model_of_run(state_file: Path) -> Path:
    try:
        return Path(json.loads(state_file.read_text())["recipe"]["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{state_file} cannot be used ({type(error).__name__}: {error}); use another checkpoint"
        ) from None
