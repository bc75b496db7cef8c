"""Two recordings beside each other, and the first operation that differs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_opo.bisect.operations import CAUSES, LOGITS, LOGPROB, Operation
from megatron_opo.bisect.recording import Recording, Sequences


@dataclass(frozen=True)
class Difference:
    """Of some tokens: the share of values that are equal to the bit, the largest difference, and
    the largest one relative to the largest value of its token."""

    equal: float
    largest: float
    relative: float


@dataclass(frozen=True)
class Line:
    """One operation; a part is None where there are no such tokens, and `problem` says why there
    are neither."""

    operation: Operation
    prefill: Difference | None = None
    decode: Difference | None = None
    problem: str = ""

    @property
    def parts(self) -> list[Difference]:
        return [part for part in (self.prefill, self.decode) if part is not None]

    @property
    def is_equal(self) -> bool:
        return all(part.equal == 1 for part in self.parts)

    @property
    def relative(self) -> float:
        return max((part.relative for part in self.parts), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """`rounding` is the relative difference that rounding alone does not make."""

    lines: tuple[Line, ...]
    rounding: float

    @property
    def first(self) -> Line | None:
        """The first operation that differs, in the order of computation."""
        return next((line for line in self.lines if not line.is_equal), None)

    @property
    def first_large(self) -> Line | None:
        """The first one that differs by more than rounding."""
        return next((line for line in self.lines if line.relative > self.rounding), None)

    def unseen_before(self, line: Line) -> list[Line]:
        """Operations between the last one that is known to be equal and `line`."""
        unseen: list[Line] = []
        for each in self.lines[: self.lines.index(line)]:
            unseen = [*unseen, each] if each.problem else []
        return unseen

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        lines = [
            {
                "operation": line.operation.name,
                "layer": line.operation.layer,
                "prefill": line.prefill and asdict(line.prefill),
                "decode": line.decode and asdict(line.decode),
                "problem": line.problem,
            }
            for line in self.lines
        ]
        return {
            "first": self.first and self.first.operation.title,
            "first_beyond_rounding": self.first_large and self.first_large.operation.title,
            "rounding": self.rounding,
            "operations": lines,
        }


def compare(
    wanted: Sequence[Operation],
    server: Recording,
    trainer: Recording,
    sequences: Sequences,
    dtype: torch.dtype,
) -> Comparison:
    """All operations, in their order. `dtype` is the model's."""
    decoded, predicts = sequences.is_decoded, sequences.predicts
    lines = [
        _line(
            operation,
            server.get(operation.title),
            trainer.get(operation.title),
            decoded[predicts] if operation.name in (LOGITS, LOGPROB) else decoded,
        )
        for operation in wanted
    ]
    return Comparison(tuple(lines), torch.finfo(dtype).eps ** 0.5)


def _line(
    operation: Operation,
    server: torch.Tensor | None,
    trainer: torch.Tensor | None,
    decoded: torch.Tensor,
) -> Line:
    if server is None or trainer is None:
        sides = [
            name for name, found in (("server", server), ("trainer", trainer)) if found is None
        ]
        return Line(operation, problem=f"no module of the {' and the '.join(sides)} has it")
    if server.shape != trainer.shape:
        shapes = " and ".join(str(list(each.shape)) for each in (server, trainer))
        return Line(operation, problem=f"of different shapes, {shapes}")
    return Line(
        operation,
        prefill=_difference(server[~decoded], trainer[~decoded]),
        decode=_difference(server[decoded], trainer[decoded]),
    )


def _difference(server: torch.Tensor, trainer: torch.Tensor) -> Difference | None:
    if not len(server):
        return None
    difference = (server.double() - trainer.double()).abs().nan_to_num(nan=torch.inf)
    sizes = server.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return Difference(
        equal=(server == trainer).double().mean().item(),
        largest=difference.max().item(),
        relative=(difference / sizes).max().item(),
    )


def verdict(comparison: Comparison) -> str:
    """What was found, in sentences."""
    first = comparison.first
    if first is None:
        unseen = sum(bool(line.problem) for line in comparison.lines)
        seen = f"all {len(comparison.lines) - unseen} operations"
        text = f"{seen} are equal to the bit, for all tokens"
        return text + (f"; {unseen} could not be looked at" if unseen else "")
    text = f"The first operation that differs: {first.operation.title}"
    for name, part, other in (
        ("prefill", first.prefill, first.decode),
        ("decode", first.decode, first.prefill),
    ):
        if part and part.equal == 1 and other:
            text += f" (equal in {name})"
    text += f".\nLikely causes: {CAUSES[first.operation.name]}."
    if unseen := comparison.unseen_before(first):
        names = ", ".join(line.operation.title for line in unseen)
        text += f"\nIt may also be one that could not be looked at: {names}."
    large = comparison.first_large
    if large is None:
        return text + (
            "\nNo difference is larger than rounding makes "
            f"({comparison.rounding:.1g} of a token's largest value)."
        )
    if large is not first:
        text += (
            f"\nThe first one that differs by more than rounding ({comparison.rounding:.1g} of a "
            f"token's largest value): {large.operation.title}.\nLikely causes: "
            f"{CAUSES[large.operation.name]}."
        )
    return text
