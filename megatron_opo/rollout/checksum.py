"""What a server's checksum of each of its parameters must be, computed from what was sent to it.

SGLang answers /weights_checker with one 64-bit hash per parameter and tensor-parallel rank, taken
over the bytes as they lie in its memory. Its parameters are not Hugging Face's: query, key and
value are one matrix, as are gate and up; matrices are cut over its ranks; the vocabulary is padded
with zero rows. `ExpectedChecksums` rebuilds each of these from Hugging Face tensors while they
stream past, and holds on to a tensor only until its fused partners have come. The experts of a
layer, which are two parameters there, are hashed as they come.

Covered: models of the Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE kind, unquantized, any
tensor-parallel size, on CPU and CUDA servers. Anything else (quantized weights, pipeline-parallel
servers, experts that are shared out over ranks or stored in the order of some kernel) is reported
as an error by `compare`, never passed over.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_opo.errors import WeightError

# Hugging Face module -> (SGLang's fused module, all parts in the order of its rows).
FUSED = {
    part: (fused, parts)
    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    )
    for part in parts
}
CUT_BY_COLUMNS = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_PADDING = 64
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = re.compile(r"(?P<prefix>.+\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")
# SGLang's parameter of all experts of a layer -> the parts of each, one expert after the other.
OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


class Hash(Protocol):
    """Of a tensor that comes in pieces, in the order of its bytes."""

    def update(self, piece: torch.Tensor) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass
class ExpertHashes:
    """A parameter of all experts: `hashes[size][rank]` of its first `done` pieces; pieces that
    came before their turn wait, by their number."""

    hashes: dict[int, list[Hash]]
    done: int = 0
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, number: int, piece: torch.Tensor, dim: int) -> None:
        self.waiting[number] = piece.detach()
        while (following := self.waiting.pop(self.done, None)) is not None:
            for size, ranks in self.hashes.items():
                for rank, shard in zip(ranks, following.chunk(size, dim), strict=True):
                    rank.update(shard)
            self.done += 1


class ExpectedChecksums:
    """Add every tensor that is sent, then compare with what the servers report.

    Args:
        tensor_parallel: the sizes of the servers that will be compared.
        cuda: whether the servers hold their weights on CUDA devices, where SGLang uses another
            hash.
        kv_heads: key-value heads of the model; ranks beyond them hold copies.
    """

    def __init__(self, tensor_parallel: Sequence[int], *, cuda: bool, kv_heads: int):
        self._sizes = sorted(set(tensor_parallel))
        self._hash: Callable[[Iterable[torch.Tensor]], str] = hash_cuda if cuda else hash_cpu
        self._new_hash: Callable[[], Hash] = TileHash if cuda else ShaHash
        self._kv_heads = kv_heads
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._experts: dict[str, ExpertHashes] = {}
        self._expected: dict[int, list[dict[str, str]]] = {
            size: [{} for _ in range(size)] for size in self._sizes
        }

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One whole Hugging Face tensor, in the dtype that the server holds."""
        expert = EXPERT.fullmatch(name)
        if expert:
            self._add_expert(expert["prefix"], int(expert["number"]), expert["module"], tensor)
            return
        prefix, module, kind = split_name(name)
        fused, parts = FUSED.get(module, (module, (module,)))
        target = ".".join(filter(None, (prefix, fused, kind)))
        waiting = self._parts.setdefault(target, {})
        waiting[module] = tensor.detach()
        if len(waiting) < len(parts):
            return
        del self._parts[target]
        for size in self._sizes:
            for rank in range(size):
                shards = [self._shard(waiting[p], p, kind, rank, size) for p in parts]
                self._expected[size][rank][target] = self._hash(shards)

    def _add_expert(self, prefix: str, number: int, module: str, tensor: torch.Tensor) -> None:
        for kind, parts in OF_EXPERTS.items():
            if module in parts:
                target = f"{prefix}.{kind}"
                if target not in self._experts:
                    self._experts[target] = ExpertHashes(
                        {size: [self._new_hash() for _ in range(size)] for size in self._sizes}
                    )
                place = number * len(parts) + parts.index(module)
                self._experts[target].add(place, tensor, dim=int(module in CUT_BY_COLUMNS))

    def _shard(
        self, tensor: torch.Tensor, module: str, kind: str, rank: int, size: int
    ) -> torch.Tensor:
        if module in VOCABULARY:
            return _vocabulary_shard(tensor, rank, size)
        if size == 1:
            return tensor
        if module in CUT_BY_COLUMNS:
            return tensor if kind == "bias" else tensor.chunk(size, dim=1)[rank]
        if module in ("k_proj", "v_proj") and size > self._kv_heads:
            return tensor.chunk(self._kv_heads)[rank * self._kv_heads // size]
        if module in FUSED:
            return tensor.chunk(size)[rank]
        return tensor

    def compare(self, server: str, ranks: Sequence[Mapping[str, Any]]) -> int:
        """Compare with the `ranks` of a server's answer; the number of checksums compared.

        Raises:
            WeightError: naming the parameters that differ, or that only one side has.
        """
        if self._parts:
            name, parts = next(iter(self._parts.items()))
            wanted = FUSED[next(iter(parts))][1]
            raise WeightError(
                f"weights sent to {server}: {name} is one parameter there, made of "
                f"{', '.join(wanted)}, but only {', '.join(parts)} was sent"
            )
        for name, experts in self._experts.items():
            if experts.waiting:
                parts = OF_EXPERTS[name.rpartition(".")[2]]
                number, part = divmod(experts.done, len(parts))
                raise WeightError(
                    f"weights sent to {server}: {name} is one parameter there, made of those of "
                    f"all experts, but expert {number}'s {parts[part]} was never sent"
                )
        expected = self._expected.get(len(ranks))
        if expected is None:
            raise WeightError(
                f"{server} reports weights of {len(ranks)} ranks, expected one of {self._sizes}; "
                "pipeline- and data-parallel servers cannot be verified"
            )
        for rank in ranks:
            place = rank["parallelism_info"]
            place = place[0] if isinstance(place, list) else place
            wanted = expected[place["tp_rank"]] | {
                name: experts.hashes[len(ranks)][place["tp_rank"]].hexdigest()
                for name, experts in self._experts.items()
            }
            self._compare_rank(server, place["tp_rank"], rank["checksums"], wanted)
        return sum(len(rank["checksums"]) for rank in ranks)

    def _compare_rank(
        self, server: str, rank: int, found: Mapping[str, str], wanted: dict[str, str]
    ) -> None:
        if HEAD not in found and HEAD in wanted:
            # The server ties the head to the embedding; a different one would have been ignored.
            if wanted[HEAD] != wanted.get(EMBEDDING):
                raise WeightError(
                    f"{server} ties {HEAD} to {EMBEDDING}, but the {HEAD} that was sent differs "
                    "from it; set tie_word_embeddings in the model's config.json rightly"
                )
            del wanted[HEAD]
        problems = [
            f"{name}: sent {wanted[name]}, server holds {found[name]}"
            for name in wanted
            if name in found and wanted[name] != found[name]
        ]
        problems += [f"{n}: sent, but no such parameter there" for n in wanted if n not in found]
        problems += [f"{n}: there, but never sent" for n in found if n not in wanted]
        if problems:
            more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise WeightError(
                f"{server}, tensor-parallel rank {rank}: {len(problems)} of {len(found)} weights "
                "are not what the trainer sent:\n" + "\n".join(problems[:8]) + more
            )


def split_name(name: str) -> tuple[str, str, str]:
    """model.layers.0.mlp.up_proj.weight -> ("model.layers.0.mlp", "up_proj", "weight")."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    return prefix, module, kind


def _vocabulary_shard(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    padding = VOCABULARY_PADDING
    if (-(-tensor.shape[0] // padding) * padding) % size:
        padding *= size
    rows = -(-tensor.shape[0] // padding) * padding // size
    shard = tensor[rank * rows : (rank + 1) * rows]
    missing = rows - shard.shape[0]
    if not missing:
        return shard
    return torch.cat([shard, shard.new_zeros(missing, *tensor.shape[1:])])


class ShaHash:
    """SGLang's hash of a CPU tensor: SHA-256, the first 64 bits."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, piece: torch.Tensor) -> None:
        self._digest.update(_bytes(piece).cpu().numpy().data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()[:16]


MASK32 = 0xFFFFFFFF
TILE_WORDS = 8192
TILE_BYTES = 4 * TILE_WORDS
TILES_AT_ONCE = 512
SEED = 0x243F6A88


class TileHash:
    """SGLang's hash of a CUDA tensor, in plain integer arithmetic.

    Every 32-bit word is mixed with its position and summed over tiles of 8192 words; the tiles'
    64-bit sums are added up and mixed once more. Runs on whatever device the tensors are on.
    """

    def __init__(self) -> None:
        self._size = 0
        self._sums: list[list[torch.Tensor]] = []
        self._rest: torch.Tensor | None = None

    def update(self, piece: torch.Tensor) -> None:
        flat = _bytes(piece)
        if self._rest is not None and self._rest.numel():
            flat = torch.cat([self._rest, flat])
        whole = flat.numel() // TILE_BYTES * TILE_BYTES
        for start in range(0, whole, TILE_BYTES * TILES_AT_ONCE):
            block = flat[start : min(start + TILE_BYTES * TILES_AT_ONCE, whole)]
            self._sums.append(_tile_sums(block, (self._size + start) // 4))
        self._size += whole
        # A copy, so that the piece's memory is not held.
        self._rest = flat[whole:].clone()

    def hexdigest(self) -> str:
        sums, size = list(self._sums), self._size
        if self._rest is not None and self._rest.numel():
            rest = torch.nn.functional.pad(self._rest, (0, -self._rest.numel() % 4))
            sums.append(_tile_sums(rest, size // 4))
            size += rest.numel()
        total = 0
        for halves in sums:
            mixed = [_mix32(half ^ (size & MASK32)).tolist() for half in halves]
            total += sum((high << 32) | low for high, low in zip(*mixed, strict=True))
        return f"{_splitmix64(total & (2**64 - 1)) if size else 0:016x}"


def hash_cpu(shards: Iterable[torch.Tensor]) -> str:
    """`ShaHash` of a tensor that consists of these rows."""
    return _hashed(ShaHash(), shards)


def hash_cuda(shards: Iterable[torch.Tensor]) -> str:
    """`TileHash` of a tensor that consists of these rows."""
    return _hashed(TileHash(), shards)


def _hashed(state: Hash, shards: Iterable[torch.Tensor]) -> str:
    for shard in shards:
        state.update(shard)
    return state.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tile_sums(block: torch.Tensor, first_word: int) -> list[torch.Tensor]:
    """For each tile of the bytes, both halves of the sum of its mixed words."""
    if block.storage_offset() % 4:
        block = block.clone()
    words = block.view(torch.int32)
    value = words.to(torch.int64) & MASK32
    index = torch.arange(first_word, first_word + words.numel(), device=words.device) & MASK32
    second_seed = ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & MASK32
    halves = []
    for factor, seed, turn in ((0x27D4EB2D, SEED, 15), (0x165667B1, second_seed, 13)):
        turned = ((index << turn) | (index >> (32 - turn))) & MASK32
        place = ((index * factor + seed) & MASK32) ^ turned
        mixed = _mix32(value ^ place)
        padded = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE_WORDS))
        halves.append(padded.view(-1, TILE_WORDS).sum(1) & MASK32)
    return halves


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
