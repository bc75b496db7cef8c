"""A Megatron distributed checkpoint as Hugging Face tensors, in one process and whatever layout it
was saved under.

Megatron names a parameter by the module that holds it. The layers of a uniform model are stacked:
`decoder.layers.mlp.linear_fc1.weight` is [L, ...], or [L, E, ...] for experts. Where layers differ
each has a tensor of its own: `decoder.layers.3.mlp.linear_fc1.weight`.
"""

import itertools
import math
import re
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_opo.errors import WeightError
from megatron_opo.weights.checkpoint import is_finite
from megatron_opo.weights.chunk_file import read_chunk
from megatron_opo.weights.families import Architecture, Row
from megatron_opo.weights.memory import allocate
from megatron_opo.weights.safetensors_layout import NAMES
from megatron_opo.weights.slices import FUSED_NORMS, local_shape, whole_parts
from megatron_opo.weights.text import shown_problems
from megatron_opo.weights.torch_dist import read_metadata

OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")
READ_AHEAD = 2


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: in the tensor `key` of the checkpoint at `index` of its leading
    dimensions (layer, expert). `shape` is the whole parameter's, without these."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MegatronCheckpoint:
    """An open checkpoint. `tensors` maps a Hugging Face name to (Megatron key, shape)."""

    directory: Path
    architecture: Architecture
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    rows: dict[str, Row]
    slots: dict[str, Slot]
    chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]]
    metadata: Metadata

    @property
    def per_layer(self) -> bool:
        """Each layer has tensors of its own; else those of all layers are stacked."""
        return any(re.search(r"\blayers\.\d", slot.key) for slot in self.slots.values())

    def dtype(self, name: str) -> torch.dtype:
        """Of a Hugging Face tensor, as it is stored."""
        return self._entry(self.tensors[name][0]).properties.dtype

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def parts(self, row: Row) -> list[torch.Tensor]:
        """The Hugging Face tensors of a row, whole, as they are stored.

        Raises:
            WeightError: a file is damaged.
        """
        if not row.per_kv_head:
            return [self.read(part.name, None, 0, 0) for part in row.parts]
        slot = self.slots[row.megatron]
        whole = self._box(slot, (0,) * len(slot.shape), slot.shape)
        return whole_parts(self.architecture, row, [whole])

    def read(self, name: str, dim: int | None, start: int, end: int) -> torch.Tensor:
        """Rows (or columns) `start` to `end` of a Hugging Face tensor along `dim`; None reads it
        whole. As in a slice, bounds may pass the tensor's end.

        Raises:
            WeightError: a file is damaged.
        """
        row = self.rows[name]
        slot = self.slots[row.megatron]
        index = [part.name for part in row.parts].index(name)
        shapes = [self.architecture.shape(part) for part in row.parts]
        first, last = [0] * len(shapes[index]), list(shapes[index])
        if dim is not None:
            first[dim], last[dim] = min(start, last[dim]), min(end, last[dim])
        if row.per_kv_head:
            return self._grouped(slot, [shape[0] for shape in shapes], index, first, last)
        first[0] += sum(shape[0] for shape in shapes[:index])
        last[0] += sum(shape[0] for shape in shapes[:index])
        return self._box(slot, first, last)

    def _grouped(
        self, slot: Slot, heights: list[int], index: int, first: list[int], last: list[int]
    ) -> torch.Tensor:
        """A box of a part whose key-value groups alternate with those of the other parts."""
        sizes = [height // self.architecture.kv_heads for height in heights]
        start, end, size = first[0], last[0], sizes[index]
        group, after = start // size, -(-end // size)
        above, below = group * sum(sizes), max(after, group) * sum(sizes)
        block = self._box(slot, [above, *first[1:]], [below, *last[1:]])
        part = block.unflatten(0, (-1 if len(block) else 0, sum(sizes))).split(sizes, dim=1)[index]
        return part.flatten(0, 1)[start - group * size : end - group * size]

    def _box(self, slot: Slot, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
        sizes = tuple(b - a for a, b in zip(first, last, strict=True))
        offset, whole = (*slot.index, *first), (*(1 for _ in slot.index), *sizes)
        target = allocate(whole, self._entry(slot.key).properties.dtype)
        overlaps = [
            overlap
            for chunk in self.chunks.get((slot.key, slot.index), [])
            if (overlap := _overlap(chunk, offset, whole)) is not None
        ]
        if sum(math.prod(overlap.sizes) for overlap in overlaps) != target.numel():
            raise WeightError(f"checkpoint {self.directory}: `{slot.key}` is not whole")
        for overlap in overlaps:
            place = self.metadata.storage_data[MetadataIndex(slot.key, overlap.chunk)]
            try:
                read_chunk(
                    self.directory / place.relative_path,
                    (place.offset, place.length),
                    overlap.inside,
                    target[overlap.region],
                )
            except (OSError, ValueError) as error:
                raise WeightError(
                    f"checkpoint {self.directory}: `{slot.key}` cannot be read from "
                    f"{place.relative_path} ({error}); copy it again, or use another checkpoint"
                ) from error
        return target.reshape(sizes)


@dataclass(frozen=True)
class Overlap:
    """What a chunk has of a box: at `inside` of the chunk, which lies at `chunk` of the tensor, a
    box of `sizes` that belongs into `region` of the box."""

    chunk: torch.Size
    inside: tuple[int, ...]
    sizes: tuple[int, ...]
    region: tuple[slice, ...]


def _overlap(
    chunk: ChunkStorageMetadata, offset: tuple[int, ...], sizes: tuple[int, ...]
) -> Overlap | None:
    first = [max(a, b) for a, b in zip(chunk.offsets, offset, strict=True)]
    last = [
        min(a + n, b + m)
        for a, n, b, m in zip(chunk.offsets, chunk.sizes, offset, sizes, strict=True)
    ]
    lengths = tuple(b - a for a, b in zip(first, last, strict=True))
    if min(lengths) <= 0:
        return None
    return Overlap(
        chunk=chunk.offsets,
        inside=tuple(a - b for a, b in zip(first, chunk.offsets, strict=True)),
        sizes=lengths,
        region=tuple(slice(a - c, b - c) for a, b, c in zip(first, last, offset, strict=True)),
    )


def open_megatron(directory: Path, architecture: Architecture) -> MegatronCheckpoint:
    """Open a checkpoint that holds a model of this architecture; what it holds of an optimizer is
    passed over.

    Raises:
        CheckpointError: no such checkpoint, another format, or damaged metadata or files.
        WeightError: parameters are missing, unexpected or misshapen; all are counted, some shown.
    """
    metadata = read_metadata(directory)
    stored = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not OPTIMIZER_KEY.match(key)
    }
    rows = architecture.rows()
    slots, known, missing, misshapen = {}, set(), [], {}
    for row in rows:
        shape = local_shape(architecture, row, 1)
        candidates = [slot for name in names_of(row) for slot in _slots(row, name, shape)]
        known |= {slot.key for slot in candidates}
        found = next((slot for slot in candidates if slot.key in stored), None)
        if found is None:
            missing.append(row.megatron)
            continue
        slots[row.megatron] = found
        dtype = stored[found.key].properties.dtype
        if dtype not in NAMES:
            raise WeightError(
                f"checkpoint {directory}: `{found.key}` has dtype {dtype}; allowed: "
                f"{', '.join(map(str, NAMES))} (quantised weights must be dequantised first)"
            )
        problem = _misshapen(architecture, row, found, tuple(stored[found.key].size))
        if problem:
            misshapen[found.key] = problem
    unexpected = [key for key in stored if key not in known]
    _report(directory, architecture, missing, unexpected, list(misshapen.values()))
    by_name = {part.name: (row, part) for row in rows for part in row.parts}
    return MegatronCheckpoint(
        Path(directory),
        architecture,
        {
            name: (slots[row.megatron].key, architecture.shape(part))
            for name, (row, part) in by_name.items()
        },
        {name: row for name, (row, _) in by_name.items()},
        slots,
        _by_index(stored, slots),
        metadata,
    )


def names_of(row: Row) -> list[str]:
    """A parameter's names in checkpoints, before layers are stacked: with an expert's number left
    out, and norms first as Megatron saves them where the next linear layer owns them."""
    name = re.sub(r"local_experts\.\d+\.", "experts.", row.megatron)
    for fused, separate in FUSED_NORMS.items():
        if name.endswith("." + separate):
            return [name.removesuffix(separate) + fused, name]
    return [name]


def stacked(row: Row, name: str) -> str:
    """Key of the tensor that holds this parameter of all layers."""
    return name if row.layer is None else name.replace(f".{row.layer}.", ".", 1)


def _slots(row: Row, name: str, shape: tuple[int, ...]) -> list[Slot]:
    expert = () if row.expert is None else (row.expert,)
    if row.layer is None:
        return [Slot(name, (), shape)]
    return [Slot(stacked(row, name), (row.layer, *expert), shape), Slot(name, expert, shape)]


def _misshapen(
    architecture: Architecture, row: Row, slot: Slot, found: tuple[int, ...]
) -> str | None:
    experts = () if row.expert is None else (architecture.experts.count,)  # pyright: ignore
    leading = (architecture.layers, *experts)[-len(slot.index) :] if slot.index else ()
    must = (*leading, *slot.shape)
    if row.parts[0].shape[0] == "vocab" and len(found) == len(must):
        if found[0] >= must[0] and found[1:] == must[1:]:
            return None
        return f"{slot.key} is {list(found)}, must be {list(must)} (or padded with more rows)"
    return None if found == must else f"{slot.key} is {list(found)}, must be {list(must)}"


def _report(
    directory: Path,
    architecture: Architecture,
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
) -> None:
    if problems := shown_problems(missing=missing, unexpected=unexpected, misshapen=misshapen):
        raise WeightError(
            f"checkpoint {directory} does not hold the {architecture.family.model_type} model that "
            f"config.json describes: parameters{problems}"
        )


def _by_index(
    stored: dict[str, TensorStorageMetadata], slots: dict[str, Slot]
) -> dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]]:
    """The chunks in which each layer and expert of a tensor lies: there may be very many."""
    depths = {slot.key: len(slot.index) for slot in slots.values()}
    chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = {}
    for key, depth in depths.items():
        for chunk in stored[key].chunks:
            spans = zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
            for index in itertools.product(*(range(a, a + n) for a, n in spans)):
                chunks.setdefault((key, index), []).append(chunk)
    return chunks


def hf_tensors(
    checkpoint: MegatronCheckpoint, dtype: torch.dtype | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """All tensors by their Hugging Face names, in the order of `Architecture.rows`, in `dtype` or
    as they are stored. A few parameters are read ahead; no more are in memory.

    Raises:
        WeightError: a file is damaged, or a value is not finite in `dtype`.
    """
    rows = deque(checkpoint.architecture.rows())
    pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="read")
    try:
        coming: deque[tuple[Row, Future[list[torch.Tensor]]]] = deque()
        while rows or coming:
            while rows and len(coming) < READ_AHEAD:
                row = rows.popleft()
                coming.append((row, pool.submit(_finite_parts, checkpoint, row, dtype)))
            row, future = coming.popleft()
            yield from zip((part.name for part in row.parts), future.result(), strict=True)
            del future
    finally:
        pool.shutdown(cancel_futures=True)


def _finite_parts(
    checkpoint: MegatronCheckpoint, row: Row, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    parts = checkpoint.parts(row)
    for i, stored in enumerate(parts):
        parts[i] = stored if dtype is None else stored.to(dtype)
        if not is_finite(parts[i]):
            how = "holds NaN or infinity"
            if is_finite(stored):
                how = f"holds values that {dtype} cannot represent; choose another dtype"
            slot = checkpoint.slots[row.megatron]
            raise WeightError(
                f"checkpoint {checkpoint.directory}: `{row.parts[i].name}` (in `{slot.key}`) {how}"
            )
    return parts
