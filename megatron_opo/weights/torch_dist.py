"""The `.metadata` of a Megatron distributed checkpoint, read without running what is in it.

Such a checkpoint (format torch_dist) is a directory of `*.distcp` files, in which tensors lie in
chunks, and a pickle that says which chunk of which tensor is where. A pickle may name any function
to be called; here only the classes pass of which such metadata consists.
"""

import io
import json
import pickle
import pickletools
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_opo.errors import CheckpointError

METADATA = ".metadata"
FORMAT = "torch_dist"


class MCoreMetadata(Metadata):
    """What versions of Megatron-Core before 0.16 write: a Metadata with caches of their own."""


class MCoreSavePlan(planner.SavePlan):
    """As MCoreMetadata."""


def _admitted() -> dict[tuple[str, str], Any]:
    classes = {
        metadata: (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        filesystem: ("_StorageInfo", "_StoragePrefix"),
        planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    }
    admitted: dict[tuple[str, str], Any] = {
        (module.__name__, name): getattr(module, name)
        for module, names in classes.items()
        for name in names
    }
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    admitted |= {("torch", name): value for name, value in dtypes.items()}
    megatron = "megatron.core.dist_checkpointing.strategies.torch"
    return admitted | {
        (megatron, "MCoreMetadata"): MCoreMetadata,
        (megatron, "MCoreSavePlan"): MCoreSavePlan,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): dict,
        ("pathlib", "PosixPath"): PosixPath,
        ("pathlib._local", "PosixPath"): PosixPath,
    }


class _Refused(Exception):
    """Names what may not be unpickled."""


class _MetadataUnpickler(pickle.Unpickler):
    admitted = _admitted()

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.admitted[module_name, global_name]
        except KeyError:
            raise _Refused(f"{module_name}.{global_name}") from None


def _unpickled(content: bytes) -> Any:
    memos = [
        argument
        for opcode, argument, _ in pickletools.genops(content)
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument is not None
    ]
    # CPython makes room for as many memos as the largest number says: one damaged byte, and it
    # asks for gigabytes.
    if (largest := max(memos, default=0)) > len(content):
        raise pickle.UnpicklingError(f"memo {largest:,} in a pickle of {len(content):,} bytes")
    return _MetadataUnpickler(io.BytesIO(content)).load()


def read_metadata(directory: Path) -> Metadata:
    """Read and check the metadata of a checkpoint; all files it speaks of are there, and are long
    enough for what they hold. `storage_data` maps a chunk to its file.

    Raises:
        CheckpointError: no such checkpoint, another format, or damaged metadata or files.
    """
    directory = Path(directory)
    _check_format(directory)
    path = directory / METADATA
    try:
        found = _unpickled(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {directory}: {METADATA} is missing: it was not written to its end, or not "
            "copied whole (the file's name begins with a dot)"
        ) from None
    except _Refused as refused:
        raise CheckpointError(
            f"checkpoint {directory}: {METADATA} wants to load {refused}, of which no checkpoint's "
            "metadata consists; nothing was run. It was made by an unknown program, or to do harm: "
            "use another copy"
        ) from None
    # A damaged pickle may fail in any way.
    except Exception as error:
        raise _damaged(directory, f"{type(error).__name__}: {error}") from None
    _check(directory, found)
    return found


def _check_format(directory: Path) -> None:
    path = directory / "metadata.json"
    try:
        found = json.loads(path.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {directory}: no metadata.json in it: not a Megatron distributed checkpoint"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: metadata.json cannot be used ({error!r})"
        ) from None
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {directory}: metadata.json says the format {found!r}; allowed: "
            f"{FORMAT!r} (save it again with --ckpt-format {FORMAT})"
        )


def _damaged(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory}: {METADATA} is damaged ({reason}); use another copy"
    )


def _check(directory: Path, found: Any) -> None:
    if not isinstance(found, Metadata):
        raise _damaged(directory, f"it holds a {type(found).__name__}")
    try:
        _check_places(directory, found)
        _check_chunks(directory, found)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise _damaged(directory, f"{type(error).__name__}: {error}") from None


def _check_places(directory: Path, found: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in found.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise _damaged(directory, f"it names the file {info.relative_path!r}")
        if info.offset < 0 or info.length < 0:
            raise _damaged(directory, f"a place in {info.relative_path} before its beginning")
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    for name, end in ends.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                f"checkpoint {directory}: {name} is missing; copy the whole directory again"
            )
        if path.stat().st_size < end:
            raise CheckpointError(
                f"checkpoint {directory}: {name} is truncated ({path.stat().st_size} bytes of at "
                f"least {end}); copy it again, or use another checkpoint"
            )


def _check_chunks(directory: Path, found: Metadata) -> None:
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str):
            raise _damaged(directory, f"a tensor's name is {key!r:.60}")
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise _damaged(directory, f"`{key}` is a {type(entry).__name__}")
        if not isinstance(entry.properties, TensorProperties):
            raise _damaged(directory, f"`{key}` has no properties")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise _damaged(directory, f"`{key}` has no dtype")
        for chunk in entry.chunks:
            if not isinstance(chunk.offsets, torch.Size) or not isinstance(chunk.sizes, torch.Size):
                raise _damaged(directory, f"`{key}` has a chunk without a place")
            inside = all(
                offset >= 0 and size >= 0 and offset + size <= whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            )
            if not inside or MetadataIndex(key, chunk.offsets) not in found.storage_data:
                raise _damaged(directory, f"`{key}` has a chunk at {tuple(chunk.offsets)}")
