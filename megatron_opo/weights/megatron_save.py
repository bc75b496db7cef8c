"""A Hugging Face directory as a Megatron distributed checkpoint, written by one process.

Nothing in it depends on a layout: Megatron loads it under any tensor, pipeline, virtual pipeline,
expert and data parallelism.
"""

import json
import math
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_opo.errors import WeightError
from megatron_opo.weights.checkpoint import (
    Checkpoint,
    check_names,
    is_finite,
    open_checkpoint,
    read_config,
)
from megatron_opo.weights.families import EMBEDDING, OUTPUT, Architecture, Row
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import names_of, stacked
from megatron_opo.weights.new_directory import check_space, check_target, new_directory
from megatron_opo.weights.save import COMPANIONS
from megatron_opo.weights.slices import local_shape, merge
from megatron_opo.weights.streaming import OnProgress, StreamedFile
from megatron_opo.weights.torch_dist import FORMAT, METADATA

CHUNK_BYTES = 2**26
# What torch.save adds to a tensor's bytes, at most.
CHUNK_OVERHEAD = 2048
DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class Chunk:
    """A box of the checkpoint's tensor `key` (of shape `whole`), made of rows `bounds` of each of
    the Hugging Face tensors `names`; where there are several, they alternate `kv_groups` times."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    row: Row
    names: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    kv_groups: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def save_megatron(
    directory: Path,
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    threads: int = 2,
    on_progress: OnProgress | None = None,
) -> None:
    """Convert the Hugging Face model in `source`; its config, tokenizer and generation config go to
    `directory`/hf. The directory appears under its name only when it is complete.

    Memory: a few chunks of 64 MB for each thread, whatever the model's size.

    Args:
        dtype: of all weights; None keeps theirs (where those of one Megatron tensor differ, the
            narrowest that holds all).
        threads: each writes a file of its own.
        on_progress: called with the bytes done and the total, by one thread at a time.

    Raises:
        RecipeError: config.json is not supported.
        WeightError: tensors are missing, unexpected, misshapen, not finite, or files are damaged.
        CheckpointError: `directory` exists, or cannot be written, or does not fit on the disk.
    """
    directory, source = Path(directory), Path(source)
    check_target(directory)
    architecture = read_architecture(read_config(source))
    with ExitStack() as stack:
        checkpoint = open_checkpoint(source, stack)
        check_names(checkpoint, architecture.hf_shapes(), architecture.tied)
        chunks = _chunks(checkpoint, architecture, dtype)
        objects = _object_names(architecture)
        check_space(
            directory,
            sum(chunk.num_bytes for chunk in chunks)
            + CHUNK_OVERHEAD * (len(chunks) + len(objects)),
        )
        with new_directory(directory) as partial:
            writer = _Writer(partial, checkpoint, architecture, chunks, on_progress)
            storage = writer.run(threads)
            _write_metadata(partial, chunks, objects, storage)
            _copy_companions(partial / "hf", source)


def _keys(architecture: Architecture, row: Row) -> list[tuple[str, tuple[int, ...], tuple]]:
    """Key, index and sizes of the leading dimensions of each tensor that holds the parameter."""
    experts = architecture.experts
    mixed = experts is not None and 0 < len(experts.layers) < architecture.layers
    index, leading = (
        ((), ()) if row.layer is None or mixed else ((row.layer,), (architecture.layers,))
    )
    if row.expert is not None and experts is not None:
        index, leading = (*index, row.expert), (*leading, experts.count)
    names = names_of(row)
    if experts is None or row.layer not in experts.layers:
        names = names[:1]
    # Before experts, Megatron's layer specs do not agree on the norm's name: it stands under both.
    return [(name if mixed else stacked(row, name), index, leading) for name in names]


def _chunks(
    checkpoint: Checkpoint, architecture: Architecture, dtype: torch.dtype | None
) -> list[Chunk]:
    rows = [(key, row) for row in architecture.rows() for key in _keys(architecture, row)]
    dtypes: dict[str, torch.dtype] = {}
    for (key, _, _), row in rows:
        found = [dtype or checkpoint.entries[part.name].dtype for part in row.parts]
        dtypes[key] = reduce(torch.promote_types, found, dtypes.get(key, found[0]))
    return [
        chunk
        for (key, index, leading), row in rows
        for chunk in _row_chunks(architecture, row, key, index, leading, dtypes[key])
    ]


def _row_chunks(
    architecture: Architecture,
    row: Row,
    key: str,
    index: tuple[int, ...],
    leading: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[Chunk]:
    shapes = [architecture.shape(part) for part in row.parts]
    names = [part.name for part in row.parts]
    whole = (*leading, *local_shape(architecture, row, 1))
    # Parts that alternate by key-value groups are cut together, between groups.
    if row.per_kv_head:
        blocks = [(tuple(names), architecture.kv_heads, [s[0] for s in shapes])]
    else:
        blocks = [((name,), s[0], [s[0]]) for name, s in zip(names, shapes, strict=True)]
    width = math.prod(shapes[0][1:])
    above = 0
    for block_names, units, block_heights in blocks:
        heights = [height // units for height in block_heights]
        step = max(1, CHUNK_BYTES // (sum(heights) * width * dtype.itemsize))
        for first in range(0, units, step):
            count = min(step, units - first)
            yield Chunk(
                key=key,
                whole=whole,
                offset=(*index, above + first * sum(heights), *(0 for _ in shapes[0][1:])),
                sizes=(*(1 for _ in index), count * sum(heights), *shapes[0][1:]),
                row=row,
                names=block_names,
                bounds=tuple((first * h, (first + count) * h) for h in heights),
                kv_groups=count,
                dtype=dtype,
            )
        above += sum(block_heights)


def _object_names(architecture: Architecture) -> list[str]:
    """What Megatron asks for beside parameters: an object for each module that may have a state of
    its own (Transformer Engine's scaling factors)."""
    names = {
        f"{key.rpartition('.')[0]}._extra_state/shard_{_dotted(index, 0)}_{_dotted(leading, 1)}": 0
        for row in architecture.rows()
        if row.megatron.startswith("decoder.")
        for key, index, leading in _keys(architecture, row)
    }
    return list(names)


def _dotted(numbers: tuple[int, ...], default: int) -> str:
    return ".".join(map(str, numbers or (default,)))


class _Writer:
    """Writes chunks into files, one for each thread; the threads share the list of chunks."""

    def __init__(
        self,
        directory: Path,
        checkpoint: Checkpoint,
        architecture: Architecture,
        chunks: list[Chunk],
        on_progress: OnProgress | None,
    ):
        self._directory = directory
        self._checkpoint = checkpoint
        self._tied = architecture.tied
        self._total = sum(chunk.num_bytes for chunk in chunks)
        self._done = 0
        self._on_progress = on_progress
        self._chunks: Iterator[Chunk] = iter(chunks)
        self._lock = threading.Lock()
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def run(self, threads: int) -> dict[MetadataIndex, _StorageInfo]:
        """Where each chunk lies, when all are on the disk."""
        with ThreadPoolExecutor(threads, thread_name_prefix="write") as pool:
            try:
                for future in [pool.submit(self._write_file, i) for i in range(threads)]:
                    future.result()
            finally:
                self._chunks = iter(())  # for the other threads, when one failed
        return self._storage

    def _write_file(self, number: int) -> None:
        name = f"__0_{number}.distcp"
        with StreamedFile(self._directory / name, "wb") as file:
            while (chunk := self._next()) is not None:
                tensor = self._read(chunk)
                start = file.tell()
                _save(tensor, file)
                size = file.tell() - start
                # The disk begins to work now, and not only when the whole file is flushed.
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)
                self._count(chunk, _StorageInfo(name, start, size))
            os.fsync(file.fileno())

    def _next(self) -> Chunk | None:
        with self._lock:
            return next(self._chunks, None)

    def _count(self, chunk: Chunk, place: _StorageInfo) -> None:
        with self._lock:
            self._storage[MetadataIndex(chunk.key, chunk.offset)] = place
            self._done += chunk.num_bytes
            if self._on_progress:
                self._on_progress(self._done, self._total)

    def _read(self, chunk: Chunk) -> torch.Tensor:
        parts = []
        for name, bounds in zip(chunk.names, chunk.bounds, strict=True):
            stored = self._checkpoint.read(name, 0, *bounds)
            value = stored.to(chunk.dtype)
            if not is_finite(value):
                how = "holds NaN or infinity"
                if is_finite(stored):
                    how = f"holds values that {chunk.dtype} cannot represent; use another dtype"
                raise WeightError(f"{self._checkpoint.directory}: `{name}` {how}")
            if self._tied and chunk.row is EMBEDDING:
                self._check_head(stored, bounds)
            parts.append(value)
        return merge(chunk.row, parts, chunk.kv_groups).reshape(chunk.sizes)

    def _check_head(self, embedding: torch.Tensor, bounds: tuple[int, int]) -> None:
        head = OUTPUT.parts[0].name
        if head in self._checkpoint.tensors and not torch.equal(
            self._checkpoint.read(head, 0, *bounds), embedding
        ):
            raise WeightError(
                f"{self._checkpoint.directory}: config.json says tie_word_embeddings, but `{head}` "
                f"differs from `{EMBEDDING.parts[0].name}`; set it to false, or remove the head"
            )


def _save(tensor: torch.Tensor, file: IO[bytes]) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # What went wrong in writing is hidden behind what then goes wrong in closing.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_metadata(
    directory: Path,
    chunks: list[Chunk],
    objects: list[str],
    storage: dict[MetadataIndex, _StorageInfo],
) -> None:
    entries: dict[str, Any] = {}
    for chunk in chunks:
        entry = entries.setdefault(
            chunk.key,
            TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.whole), []),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)))
    empty = directory / "__0_objects.distcp"
    torch.save([None], empty)  # all modules share one object: that there is no state
    place = _StorageInfo(empty.name, 0, empty.stat().st_size)
    entries |= {name: BytesStorageMetadata() for name in objects}
    storage = storage | {MetadataIndex(name): place for name in objects}
    found = Metadata(entries, {}, storage, StorageMeta(), DCP_VERSION)
    (directory / METADATA).write_bytes(pickle.dumps(found))
    torch.save({}, directory / "common.pt")
    form = {"sharded_backend": FORMAT, "sharded_backend_version": 1}
    form |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(form))


def _copy_companions(directory: Path, source: Path) -> None:
    directory.mkdir()
    for pattern in ("config.json", *COMPANIONS):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
