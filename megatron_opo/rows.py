"""Files and procedural tasks -> checked rows.

Files hold rows in verl's schema (data_source, prompt as a chat list, reward_model.ground_truth,
extra_info) or plain ones (a prompt and an answer column); a procedural dataset is generated.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opo import procedural
from megatron_opo.errors import DataError
from megatron_opo.recipe import DatasetConfig, ProceduralConfig

DEFAULT_ANSWER_KEY = DatasetConfig.model_fields["answer_key"].default
PARQUET_ROWS = 1024
ABSENT = object()


@dataclass(frozen=True)
class Row:
    """One question before tokenisation. `where` names its place in error messages.

    Example: Row("train.jsonl line 3", ({"role": "user", "content": "2+2="},), "train", "4", {}).
    """

    where: str
    messages: tuple[dict[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_rows(dataset: DatasetConfig, split: str) -> Iterator[Row]:
    """The checked rows of a dataset, in the order of its files.

    Raises:
        DataError: a file or row that cannot be used.
        RecipeError: a procedural task or an option of it that does not exist.
    """
    if dataset.procedural is not None:
        rows = _procedural_rows(dataset.procedural, dataset.limit, split)
    else:
        rows = _file_rows(dataset, split)
    for count, row in enumerate(rows):
        if count == dataset.limit:
            return
        yield row


def _procedural_rows(source: ProceduralConfig, limit: int | None, split: str) -> Iterator[Row]:
    size = min(source.size, limit or source.size)
    field = f"data.{split}.procedural"
    pairs = procedural.generate(source.task, size, source.seed, source.config, field)
    options = {"task": source.task, "size": size, "seed": source.seed, "config": source.config}
    for index, (question, answer) in enumerate(pairs):
        yield Row(
            where=f"{field} row {index}",
            messages=({"role": "user", "content": question},),
            data_source=f"reasoning_gym/{source.task}",
            ground_truth=answer,
            extra_info={**options, "index": index},
        )


def check_files(dataset: DatasetConfig, split: str) -> None:
    """Raises DataError: a file is not there, or of a kind that is not read."""
    for path in map(Path, dataset.files):
        if path.suffix not in _READERS:
            raise DataError(
                f"data.{split}.files: {path} ends in {path.suffix!r}, must be one of: "
                f"{', '.join(_READERS)}"
            )
        try:
            if path.is_file():
                continue
            what = "is a directory, give the files in it" if path.is_dir() else "does not exist"
        except OSError as error:
            what = f"cannot be looked at: {error.strerror}"
        raise DataError(f"data.{split}.files: {path} {what}")


def _file_rows(dataset: DatasetConfig, split: str) -> Iterator[Row]:
    check_files(dataset, split)
    for path in map(Path, dataset.files):
        empty = True
        for where, record in read_records(path):
            empty = False
            yield parse_row(record, where, dataset, split, default_source=path.stem)
        if empty:
            raise DataError(f"data.{split}.files: {path} has no rows")


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield where, _parse_json(line, where)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); each line must be one JSON object"
        ) from None


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for record in batch.to_pylist():
                    yield f"{path} row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as parquet after {number} rows: {error}") from None


_READERS = {".parquet": _parquet_records, ".jsonl": _jsonl_records}


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The place of each record and what stands there, unchecked. For files that `check_files`
    accepts.

    Raises:
        DataError: the file is damaged, after those before that place.
    """
    return _READERS[path.suffix](path)


def parse_row(
    record: Any, where: str, dataset: DatasetConfig, split: str, default_source: str
) -> Row:
    """Check one record of a file. verl's reward_model.ground_truth is the answer unless the
    recipe names an answer column of its own; without a data_source the file's name stands for it.

    Raises:
        DataError: naming `where`, the field, what was found and what is allowed.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be an object with columns, got {_short(record)}")
    prompt = _lookup(record, dataset.prompt_key)
    if prompt is ABSENT or prompt is None:
        raise DataError(
            f"{where}: {_missing(prompt, dataset.prompt_key)}; columns there: {_columns(record)}; "
            f"name the right one in data.{split}.prompt_key"
        )
    answer_keys = [dataset.answer_key]
    if dataset.answer_key == DEFAULT_ANSWER_KEY:
        answer_keys.insert(0, "reward_model.ground_truth")
    answers = [_lookup(record, key) for key in answer_keys]
    found = [a for a in answers if a is not ABSENT and a is not None]
    if not found:
        raise DataError(
            f"{where}: {_missing(answers[-1], dataset.answer_key)}; columns there: "
            f"{_columns(record)}; name the right one in data.{split}.answer_key"
        )
    source, extra = record.get("data_source"), record.get("extra_info")
    source = default_source if source is None else source
    extra = {} if extra is None else extra
    if not isinstance(source, str):
        raise DataError(f"{where}: data_source must be text, got {_short(source)}")
    if not isinstance(extra, dict):
        raise DataError(f"{where}: extra_info must be an object, got {_short(extra)}")
    for name, value in (("the answer", found[0]), ("extra_info", extra)):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name} must be JSON-like data: {error}") from None
    messages = _messages(prompt, f"{where}: {dataset.prompt_key}")
    return Row(where, messages, source, found[0], extra)


def _lookup(record: dict[str, Any], key: str) -> Any:
    if key in record:
        return record[key]
    node: Any = record
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return ABSENT
        node = node[part]
    return node


def _missing(value: Any, key: str) -> str:
    return f"`{key}` is null" if value is None else f"has no `{key}`"


def _columns(record: dict[str, Any]) -> str:
    names = ", ".join(map(str, record)) or "none"
    return names.encode(errors="backslashreplace").decode()


def _short(value: Any) -> str:
    text = ascii(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _messages(prompt: Any, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where} must be text or a list of messages, got {_short(prompt)}")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise DataError(f"{where}[{number}] must be a message object, got {_short(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _short(message[key]) if key in message else f"keys {sorted(message)}"
                raise DataError(f"{where}[{number}] must have `{key}` as text, got {found}")
            try:
                message[key].encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{where}[{number}] is not valid Unicode: {error}") from None
    if not prompt[-1]["content"].strip():
        raise DataError(f"{where} is empty")
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where} ends with a message of the assistant; it must end where the model is to "
            "answer (is this a fine-tuning dataset with the answer in it?)"
        )
    # Parquet gives every message the keys of all of them, null where there was none.
    return tuple({k: v for k, v in message.items() if v is not None} for message in prompt)
