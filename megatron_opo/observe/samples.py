"""Which responses of a step are kept, and how they look in samples/*.jsonl."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from megatron_opo.batch import Group, Sample
from megatron_opo.observe.files import read_json_lines, replace_text, to_json_line

Kind = Literal["train", "eval"]
# Text of token ids, as the server gives it: without special tokens.
Decode = Callable[[tuple[int, ...]], str]
# A number for each sample of each group.
Values = Sequence[Sequence[float | None]]
# What the trainer says of each token of a response, by name; {} of a response it did not see.
TokenValues = Callable[[Sample], dict[str, list[float]]]
# Of longer responses no values of tokens are kept: they would be most of what a run writes.
MOST_TOKENS_WITH_VALUES = 4096
# A character may take four tokens of one byte each.
MOST_TOKENS_OF_A_CHARACTER = 4


def choose_groups(groups: list[Group], limit: int, kind: Kind) -> list[int]:
    """Indices of the groups to keep: whole ones, together at most `limit` samples.

    A group's members can only be judged against each other, so none is cut; one group is kept
    even when it is larger than `limit` (unless that is 0). Of a training step: the group whose
    rewards differ most, the worst and the best, the next of each, and so on. Of an evaluation:
    the first ones, so that the same prompts can be followed through the run.
    """
    if limit == 0:
        return []
    order = list(range(len(groups))) if kind == "eval" else _most_telling_first(groups)
    chosen, total = [], 0
    for index in order:
        size = len(groups[index].samples)
        if not chosen or total + size <= limit:
            chosen.append(index)
            total += size
    return chosen


def _most_telling_first(groups: list[Group]) -> list[int]:
    means, spreads = [], []
    for group in groups:
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else -math.inf
        means.append(mean)
        spreads.append(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards)))
    indices = range(len(groups))
    rankings = (
        sorted(indices, key=lambda i: -spreads[i]),
        sorted(indices, key=lambda i: means[i]),
        sorted(indices, key=lambda i: -means[i]),
    )
    # A dict keeps the first place of each index.
    return list(dict.fromkeys(index for triple in zip(*rankings, strict=True) for index in triple))


def sample_record(
    step: int,
    group: Group,
    sample: Sample,
    advantage: float | None,
    baseline: float | None = None,
    decode: Decode | None = None,
    token_values: TokenValues | None = None,
) -> dict[str, Any]:
    """One line of a samples file. `logprob` is the sum over the response's tokens, in nats.

    `added` are the ranges of characters of the response that the policy did not say, where there
    are any.

    With `decode` also `token_chars`, how many characters of the response each token adds,
    `token_logprobs`, and what `token_values` says, null where the policy did not sample. Not of
    responses of more than MOST_TOKENS_WITH_VALUES tokens, nor where the tokens, decoded one by
    one, do not add up to the response.
    """
    record = {
        "step": step,
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt": group.prompt.text,
        "response": sample.text,
        "ground_truth": group.prompt.ground_truth,
        "reward": finite(sample.reward),
        "advantage": finite(advantage),
        "baseline": finite(baseline),
        "length": sample.length,
        "finish_reason": sample.finish_reason,
        "logprob": finite(sum(sample.logprobs)),
        "reward_error": sample.reward_error,
    }
    if sample.added:
        record["added"] = [list(span) for span in sample.added]
    short = len(sample.response_ids) <= MOST_TOKENS_WITH_VALUES
    chars = token_chars(sample, decode) if decode and short else None
    if chars is not None:
        record["token_chars"] = chars
        values = {"token_logprobs": sample.logprobs}
        values |= token_values(sample) if token_values else {}
        own = sample.loss_mask or (True,) * len(chars)
        for name, of_tokens in values.items():
            record[name] = [
                _rounded(x) if mine else None for x, mine in zip(of_tokens, own, strict=True)
            ]
    return record


def _rounded(value: float) -> float | None:
    """Three digits tell enough for a colour, and make up most of the file."""
    return float(f"{value:.2e}") if math.isfinite(value) else None


def token_chars(sample: Sample, decode: Decode) -> list[int] | None:
    """How many characters of the text each token adds: 0 for a special one, and for one whose
    character ends with a later token. None if that does not make the text.

    The first token of what was added stands for all of it: its special tokens are in the text.
    """
    chars, text = [], ""
    added = iter(sample.added)
    own = sample.loss_mask if sample.loss_mask and sample.added else (True,) * len(sample.logprobs)
    tokens = zip(own, sample.response_ids, strict=True)
    for mine, turn in groupby(tokens, key=lambda pair: pair[0]):
        ids = tuple(token for _, token in turn)
        if mine:
            sizes, said = _decoded(ids, decode)
        else:
            said = sample.text[slice(*next(added, (0, 0)))]
            sizes = [len(said)] + [0] * (len(ids) - 1)
        chars += sizes
        text += said
    return chars if text == sample.text else None


def _decoded(ids: tuple[int, ...], decode: Decode) -> tuple[list[int], str]:
    chars, text, pending = [], "", ()
    for token in ids:
        pending += (token,)
        piece = decode(pending)
        if piece.endswith("\ufffd") and len(pending) < MOST_TOKENS_OF_A_CHARACTER:
            chars.append(0)
            continue
        chars.append(len(piece))
        text, pending = text + piece, ()
    if pending:
        rest = decode(pending)
        chars[-1] = len(rest)
        text += rest
    return chars, text


def finite(value: float | None) -> float | None:
    """The value as JSON can hold it: NaN and infinities become None."""
    return None if value is None or not math.isfinite(value) else float(value)


def samples_path(run_path: Path, step: int, kind: Kind) -> Path:
    prefix = "eval_step" if kind == "eval" else "step"
    return run_path / "samples" / f"{prefix}_{step:06d}.jsonl"


def write_samples(
    run_path: Path,
    step: int,
    groups: list[Group],
    advantages: Values | None,
    kind: Kind,
    limit: int,
    *,
    baselines: Values | None = None,
    decode: Decode | None = None,
    token_values: TokenValues | None = None,
) -> Path | None:
    """Keep the telling groups of a step; None when `limit` is 0.

    `advantages` and `baselines` run parallel to the groups and their samples; None (or NaN)
    stands for a sample that does not train. `decode`, `token_values`: see `sample_record`.
    """
    lines = []
    for index in choose_groups(groups, limit, kind):
        group = groups[index]
        nothing = [None] * len(group.samples)
        ours = advantages[index] if advantages is not None else nothing
        subtracted = baselines[index] if baselines is not None else nothing
        for sample, advantage, baseline in zip(group.samples, ours, subtracted, strict=True):
            record = sample_record(step, group, sample, advantage, baseline, decode, token_values)
            lines.append(to_json_line(record))
    if not lines:
        return None
    path = samples_path(run_path, step, kind)
    replace_text(path, "".join(lines))
    return path


def list_samples(run_path: Path, kind: Kind) -> list[tuple[int, Path]]:
    """(step, file) of every samples file of that kind, in the order of steps."""
    prefix = "eval_step_" if kind == "eval" else "step_"
    found = []
    for path in (run_path / "samples").glob(f"{prefix}*.jsonl"):
        digits = path.stem.removeprefix(prefix)
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def read_samples(path: Path) -> list[list[dict[str, Any]]]:
    """The groups of a samples file, each a list of its records."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in read_json_lines(path):
        groups.setdefault(str(record.get("group_id")), []).append(record)
    return list(groups.values())
