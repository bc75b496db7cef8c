"""Do ranks that should hold the same hold the same, to the bit?

Data- and context-parallel ranks hold copies of all parameters; tensor-parallel ranks of those that
are not split (norms, routers); the first and the last pipeline stage share tied embeddings. Ranks
that drift apart train different models, and nothing else would show it.
"""

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from megatron_opo.actor.finite import SHOWN
from megatron_opo.actor.step import Actor
from megatron_opo.errors import TrainingError

# Words at once: on a CPU what its cache holds.
CHUNK_OF = {"cpu": 1 << 15, "cuda": 1 << 22}
# Odd, so that no single changed word can leave the sum as it was (2^64 / golden ratio).
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


def check_replicas(actor: Actor) -> None:
    """Compare a checksum of each parameter, and of its Adam moments where these are not sharded,
    over all ranks that hold it. One gather of 16 bytes a tensor; all ranks call it together.

    Raises:
        TrainingError: on all ranks, naming what differs and between which ranks.
    """
    held = list(_held(actor))
    mine = torch.stack(
        [
            torch.tensor([_number(identity) for identity, _, _ in held]),
            torch.stack([checksum(tensor).cpu() for _, _, tensor in held]),
        ],
        dim=1,
    )
    everyone = _gather_rows(mine, actor.parallel.control)
    odd = _disagreeing(torch.cat(everyone))
    lines = []
    for (_, name, _), number in zip(held, mine[:, 0].tolist(), strict=True):
        if number not in odd:
            continue
        ranks: dict[int, list[int]] = {}
        for rank, rows in enumerate(everyone):
            for value in rows[rows[:, 0] == number, 1].tolist():
                ranks.setdefault(value, []).append(rank)
        # The first of those that hold it speaks.
        if min(map(min, ranks.values())) == actor.parallel.rank:
            lines.append(f"{name}: {_sides(ranks)}")
    reports = [line for text in actor.driver.gather("\n".join(lines)) for line in text.splitlines()]
    if reports:
        more = [f"and {len(reports) - SHOWN} more"] if len(reports) > SHOWN else []
        raise TrainingError(
            f"version {actor.version}: ranks hold different values of what must be the same on "
            "all of them:\n  "
            + "\n  ".join(reports[:SHOWN] + more)
            + "\nNothing of this version was saved. Look for a faulty machine or a kernel that is "
            "not deterministic, and start again to go on from the newest checkpoint"
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number, as int64, of the tensor's bits and their places."""
    words = tensor.detach().contiguous().view(-1)
    size = words.element_size()
    words = words.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    chunk = CHUNK_OF[words.device.type]
    places = torch.arange(min(chunk, words.numel()), device=words.device)
    factors = (2 * places + 1) * MULTIPLIER
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(chunk):
        total = total * MULTIPLIER + (part.to(torch.int64) * factors[: part.numel()]).sum()
    return total


def _held(actor: Actor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(identity, name, tensor): tensors of the same identity must be equal wherever they are."""
    parallel = actor.parallel
    yield "version", "the policy's version", torch.tensor(actor.version)
    states = {} if actor.recipe.optimizer.distributed else _optimizer_states(actor)
    for chunk, module in enumerate(actor.modules):
        place = f"stage {parallel.pp_rank} chunk {chunk}"
        where = f" of pipeline {place}" if parallel.pp_size > 1 else ""
        for name, parameter in module.named_parameters():
            identity = f"{place} {name}"
            if getattr(parameter, "shared_embedding", False):
                identity = "tied embedding"
            if not getattr(parameter, "allreduce", True):
                identity += f" experts {parallel.ep_rank} {parallel.expert_tp_rank}"
            elif getattr(parameter, "tensor_model_parallel", False):
                identity += f" part {parallel.tp_rank}"
            yield identity, name + where, parameter
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield f"{identity} {key}", f"{key} of {name}{where}", value


def _optimizer_states(actor: Actor) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """What the optimizer holds of each parameter of the model."""
    optimizer = actor.optimizer
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    states = {main: state for part in parts for main, state in part.optimizer.state.items()}
    found = {}
    for module in actor.modules:
        for parameter in module.parameters():
            main = getattr(parameter, "main_param", None)
            if main is None:
                found[parameter] = states.get(parameter, {})
            else:
                found[parameter] = {"main parameter": main, **states.get(main, {})}
    return found


def _number(identity: str) -> int:
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Of each rank, however many they are."""
    count = torch.tensor([len(rows)])
    counts = [torch.zeros_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    padded = rows.new_zeros(max(int(n) for n in counts), rows.shape[1])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return [each[: int(n)] for each, n in zip(gathered, counts, strict=True)]


def _disagreeing(rows: torch.Tensor) -> set[int]:
    """First columns of the rows that have another second column elsewhere."""
    numbers, place = rows[:, 0].unique(return_inverse=True)
    ends = [
        torch.zeros_like(numbers).scatter_reduce(0, place, rows[:, 1], how, include_self=False)
        for how in ("amin", "amax")
    ]
    return set(numbers[ends[0] != ends[1]].tolist())


def _sides(ranks: dict[int, list[int]]) -> str:
    """ "ranks 0, 2 have 3f..., rank 1 has 7a..." """
    return ", ".join(
        f"{'ranks' if len(same) > 1 else 'rank'} {', '.join(map(str, same[:8]))}"
        f"{', ...' if len(same) > 8 else ''} {'have' if len(same) > 1 else 'has'} "
        f"{value % (1 << 64):016x}"
        for value, same in ranks.items()
    )
