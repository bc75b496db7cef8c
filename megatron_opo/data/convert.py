"""Rows of any source -> one file in verl's columns, which this project and verl read."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_opo.errors import DataError
from megatron_opo.recipe import DatasetConfig
from megatron_opo.rows import Row, read_rows

KINDS = (".jsonl", ".parquet")


def write_rows(rows: Iterator[Row], path: Path) -> int:
    """Write them, read them back, and compare; the number of rows.

    Raises:
        DataError: the file exists, is of another kind, cannot be written, or cannot hold the rows
            (parquet wants one type for all answers).
    """
    if path.suffix not in KINDS:
        raise DataError(
            f"--out: {path} ends in {path.suffix!r}, must be one of: {', '.join(KINDS)}"
        )
    if path.exists():
        raise DataError(f"--out: {path} exists already: remove it, or name another file")
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    written = list(rows)
    if not written:
        raise DataError(f"--out: no row can be used, so {path} is not written")
    try:
        _write([_record(row) for row in written], partial)
        _compare(written, partial)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"--out: {path} cannot be written: {error.strerror or error}") from None
    except UnicodeError as error:
        raise DataError(f"--out: {path}: a row is not valid Unicode: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return len(written)


def _record(row: Row) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": list(row.messages),
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": row.extra_info,
    }


def _write(records: list[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    if not any(record["extra_info"] for record in records):
        # Parquet has no struct without fields.
        records = [{k: v for k, v in r.items() if k != "extra_info"} for r in records]
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise DataError(
            f"--out: parquet cannot hold these rows ({str(error).splitlines()[0]}): a column has "
            "one type for all rows; write .jsonl instead"
        ) from None


def _compare(written: list[Row], path: Path) -> None:
    """Columns of parquet give every row all keys, with null where there was none."""
    read = read_rows(DatasetConfig(files=(str(path),)), "out")
    for before, after in zip(written, read, strict=True):
        same = (
            before.messages == after.messages
            and before.data_source == after.data_source
            and before.ground_truth == after.ground_truth
            and _without_nulls(before.extra_info) == _without_nulls(after.extra_info)
        )
        if not same:
            raise DataError(
                f"--out: what was read back differs from {before.where} (types that {path.suffix} "
                "cannot tell apart?): write "
                + ("a .jsonl file instead" if path.suffix == ".parquet" else "a .parquet file")
            )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: _without_nulls(v) for key, v in value.items() if v is not None}
        return {key: v for key, v in found.items() if v != {}}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value
