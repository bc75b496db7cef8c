"""One pass over a dataset. Of each row only a hash and a length are kept, so that size matters
little. `prompts` is imported for a tokenizer only, as torch comes with it."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_opo.errors import DataError
from megatron_opo.recipe import DataConfig, DatasetConfig
from megatron_opo.rows import Row, check_files, parse_row, read_records, read_rows

PERCENTILES = (0, 50, 90, 99, 100)
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Example:
    where: str
    prompt: str
    answer: Any


@dataclass(frozen=True)
class Survey:
    """Of one dataset, "train" or "eval".

    `unusable` has an error line for each row that cannot be used, `unanswered` how many of the
    others have an empty answer. `lengths` are sorted, in `unit` ("tokens" or "characters").
    `repeated` rows ask what an earlier one asks, `contradicting` of them with another answer.
    `questions` are hashes of what a server would be given.
    """

    split: str
    rows: int
    unusable: tuple[str, ...]
    unanswered: int
    sources: dict[str, int]
    lengths: tuple[int, ...]
    unit: str
    repeated: int
    contradicting: int
    questions: frozenset[bytes]
    examples: tuple[Example, ...]

    @property
    def usable(self) -> int:
        return len(self.lengths)

    def percentile(self, percent: float) -> int:
        """By nearest rank: the least length that so many percent of the rows do not exceed."""
        return self.lengths[max(0, math.ceil(percent / 100 * self.usable) - 1)]

    def longer_than(self, limit: int) -> int:
        return sum(length > limit for length in self.lengths)


def survey(
    dataset: DatasetConfig,
    data: DataConfig,
    tokenizer: Any,
    split: str,
    examples: int,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Survey:
    """Read all of a dataset. A row that cannot be used is counted and named, and ends nothing.

    Args:
        tokenizer: None if there is none; lengths are then in characters of the plain text.
        on_rows: called with the number of rows so far.

    Raises:
        DataError: a file is not there or of a kind that is not read, or the tokenizer lacks the
            chat template that the recipe asks for.
        RecipeError: a procedural task or an option of it that does not exist.
    """
    if tokenizer is not None:
        from megatron_opo.prompts import check_template

        check_template(data, tokenizer)
    unusable: list[str] = []
    sources: Counter[str] = Counter()
    answers: dict[bytes, bytes] = {}
    lengths: list[int] = []
    shown: list[Example] = []
    repeated = contradicting = unanswered = 0
    rows = usable_rows(dataset, split, unusable)
    for row, text, key, length in _rendered(rows, data, tokenizer, unusable):
        sources[row.data_source] += 1
        lengths.append(length)
        on_rows(len(lengths))
        unanswered += not str(row.ground_truth).strip()
        answer = _hash(json.dumps(row.ground_truth, sort_keys=True))
        if key in answers:
            repeated += 1
            contradicting += answers[key] != answer
        answers.setdefault(key, answer)
        if len(shown) < examples:
            shown.append(Example(row.where, text, row.ground_truth))
    return Survey(
        split=split,
        rows=len(lengths) + len(unusable),
        unusable=tuple(unusable),
        unanswered=unanswered,
        sources=dict(sources.most_common()),
        lengths=tuple(sorted(lengths)),
        unit="characters" if tokenizer is None else "tokens",
        repeated=repeated,
        contradicting=contradicting,
        questions=frozenset(answers),
        examples=tuple(shown),
    )


def usable_rows(dataset: DatasetConfig, split: str, unusable: list[str]) -> Iterator[Row]:
    """The rows that parse; an error line for each of the others is added to `unusable`."""
    if dataset.procedural is not None:
        yield from read_rows(dataset, split)
        return
    check_files(dataset, split)
    count = 0
    for path in map(Path, dataset.files):
        try:
            for where, record in read_records(path):
                if count == dataset.limit:
                    return
                count += 1
                try:
                    yield parse_row(record, where, dataset, split, default_source=path.stem)
                except DataError as error:
                    unusable.append(str(error))
        except DataError as error:
            unusable.append(f"{error} (nothing after it was read)")


def _rendered(
    rows: Iterator[Row], data: DataConfig, tokenizer: Any, unusable: list[str]
) -> Iterator[tuple[Row, str, bytes, int]]:
    """Each row with its text, a hash of what a server is given, and its length."""
    chunk: list[tuple[Row, str]] = []
    for row in rows:
        try:
            chunk.append((row, _text(row, data, tokenizer)))
        except DataError as error:
            unusable.append(str(error))
        if len(chunk) == CHUNK_ROWS:
            yield from _measured(chunk, data, tokenizer, unusable)
            chunk = []
    if chunk:
        yield from _measured(chunk, data, tokenizer, unusable)


def _measured(
    chunk: list[tuple[Row, str]], data: DataConfig, tokenizer: Any, unusable: list[str]
) -> Iterator[tuple[Row, str, bytes, int]]:
    if tokenizer is None:
        for row, text in chunk:
            yield row, text, _hash(text), len(text)
        return
    from megatron_opo.prompts import tokenize

    tokens = tokenize([text for _, text in chunk], data, tokenizer)
    for (row, text), ids in zip(chunk, tokens, strict=True):
        if ids:
            yield row, text, _hash(" ".join(map(str, ids))), len(ids)
        else:
            unusable.append(f"{row.where}: the prompt {text!r} has no tokens")


def _text(row: Row, data: DataConfig, tokenizer: Any) -> str:
    if tokenizer is None:
        return "\n\n".join(message["content"] for message in row.messages)
    from megatron_opo.prompts import render

    return render(row, data, tokenizer)


def _hash(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
