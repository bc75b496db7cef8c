"""A Megatron model, whatever its layout, as Hugging Face tensors."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_opo.errors import WeightError
from megatron_opo.weights.families import Architecture, Row
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.load import this_place
from megatron_opo.weights.slices import Place, local_parameters, local_shape, whole_parts

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Slice:
    """One of the slices into which the ranks cut a row's parameter; `owner` sends it."""

    row: Row
    shape: tuple[int, ...]
    owner: int


def export_hf(
    model: Sequence[torch.nn.Module],
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    shapes_elsewhere: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the whole model on global rank 0, in Hugging Face order.

    A collective over all ranks of the job, whatever its layout: each must run the iterator to its
    end, and all but rank 0 get nothing from it; whoever consumes it on rank 0 and fails must still
    exhaust it. First all agree on owners: of each slice of a parameter the lowest rank that holds
    it. Then these send to rank 0, and ranks that own nothing are done.

    With `shapes_elsewhere` the other ranks get the same names with tensors on the meta device, each
    only after they have sent what rank 0 needs for it: so they can do something together with
    rank 0 between two tensors.

    Slices travel in buckets of up to `bucket_bytes`, or of one larger parameter. Beside its bucket
    rank 0 holds one parameter's tensors at a time, and an owner only its part of the bucket.
    Tensors are in `dtype`, on rank 0's device, contiguous, and never share memory with the model.

    Raises:
        WeightError: the model is not the one that `hf_config` describes; checked before the first
            tensor, on all ranks alike.
    """
    architecture = read_architecture(hf_config)
    place = this_place()
    parameters = _agreed_parameters(model, architecture, place)
    device = next(iter(parameters.values())).device
    rows = _owned_rows(architecture, place, parameters, device)
    here = dist.get_rank()
    for bucket in _buckets(rows, bucket_bytes // dtype.itemsize):
        owned: dict[int, list[Slice]] = {}
        for each in chain.from_iterable(bucket):
            owned.setdefault(each.owner, []).append(each)
        held = [parameters[each.row.megatron].detach() for each in owned.pop(here, [])]
        # Nothing here keeps a bucket once it is done: there is never a second one in memory.
        if here == 0:
            own = [tensor.to(dtype) for tensor in held]
            yield from _rebuilt(architecture, bucket, {0: own} | _receive(owned, dtype, device))
            del own
        elif held:
            _send(held, dtype)
        if here != 0 and shapes_elsewhere:
            for part in (part for row in bucket for part in row[0].row.parts):
                shape = architecture.shape(part)
                yield part.name, torch.empty(shape, dtype=dtype, device="meta")


def _agreed_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, place: Place
) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, once every rank has found its own to be right."""
    parameters, problem = {}, None
    try:
        parameters = local_parameters(model, architecture, place)
    except WeightError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    different = list(dict.fromkeys(each for each in problems if each))
    if different:
        raise WeightError("\n".join(different))
    return parameters


def _owned_rows(
    architecture: Architecture, place: Place, parameters: Container[str], device: torch.device
) -> list[list[Slice]]:
    """The slices of every row in order, the same on all ranks."""
    rows, nobody = architecture.rows(), dist.get_world_size()
    owners = torch.full(
        (len(rows), max(place.ranks, place.expert_ranks)), nobody, dtype=torch.int32, device=device
    )
    for i, row in enumerate(rows):
        if row.megatron in parameters:
            owners[i, place.of(row)[0]] = dist.get_rank()
    # One small message for any number of ranks and parameters. It also connects all ranks of the
    # world group, as NCCL demands before some of them exchange messages in it.
    dist.all_reduce(owners, dist.ReduceOp.MIN)
    slices = []
    for row, row_owners in zip(rows, owners.tolist(), strict=True):
        count = place.of(row)[1]
        if nobody in row_owners[:count]:
            raise WeightError(f"no rank holds `{row.megatron}`, which config.json asks for")
        shape = local_shape(architecture, row, count)
        slices.append([Slice(row, shape, owner) for owner in row_owners[:count]])
    return slices


def _buckets(rows: list[list[Slice]], limit: int) -> Iterator[list[list[Slice]]]:
    """Rows that follow each other, of up to `limit` elements together, or of one larger row."""
    bucket, filled = [], 0
    for row in rows:
        size = sum(math.prod(each.shape) for each in row)
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(row)
        filled += size
    yield bucket


def _receive(
    owned: dict[int, list[Slice]], dtype: torch.dtype, device: torch.device
) -> dict[int, list[torch.Tensor]]:
    """One message from each owner, taken apart into its slices."""
    sizes = {owner: [math.prod(s.shape) for s in slices] for owner, slices in owned.items()}
    messages = {
        owner: torch.empty(sum(each), dtype=dtype, device=device) for owner, each in sizes.items()
    }
    _exchange([dist.P2POp(dist.irecv, message, owner) for owner, message in messages.items()])
    return {
        owner: [
            flat.view(each.shape)
            for flat, each in zip(message.split(sizes[owner]), owned[owner], strict=True)
        ]
        for owner, message in messages.items()
    }


def _send(tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    """To rank 0, as one message."""
    sizes = [tensor.numel() for tensor in tensors]
    message = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    for place, tensor in zip(message.split(sizes), tensors, strict=True):
        place.view(tensor.shape).copy_(tensor)
    _exchange([dist.P2POp(dist.isend, message, 0)])


def _exchange(operations: list[dist.P2POp]) -> None:
    """Batched, so that NCCL uses the world's communicator: single sends and receives would make
    one for each pair of ranks."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _rebuilt(
    architecture: Architecture, bucket: list[list[Slice]], sources: dict[int, list[torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    left = {owner: iter(tensors) for owner, tensors in sources.items()}
    for row_slices in bucket:
        row = row_slices[0].row
        slices = [next(left[each.owner]) for each in row_slices]
        taken = {tensor.untyped_storage().data_ptr() for tensor in slices}
        for part, tensor in zip(row.parts, whole_parts(architecture, row, slices), strict=True):
            _check_shape(part.name, tensor, architecture.shape(part))
            # What is neither cut nor merged still lies in the model or in the message.
            shared = tensor.untyped_storage().data_ptr() in taken
            yield part.name, tensor.clone() if shared else tensor


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise WeightError(
            f"export of `{name}`: the model holds {list(tensor.shape)}, its config.json says "
            f"{list(shape)}; nothing with a wrong shape may leave the trainer"
        )
