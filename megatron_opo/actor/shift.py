"""How far the policy moves: in each step, and from the start of the run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_opo.actor.step import Actor
from megatron_opo.batch import PackedBatch
from megatron_opo.on_policy import kl_estimate


class PolicyShift:
    """Scores each batch once more after its update, and by the weights that training started from,
    of which it keeps a copy in the host's memory.

    All ranks construct it, before a checkpoint replaces those weights, and call it together.
    """

    def __init__(self, actor: Actor):
        self._actor = actor
        self._start = [_to_host(parameter) for parameter in _parameters(actor)]

    def measure(self, batch: PackedBatch) -> dict[str, float]:
        """After the update on `batch` [T], on rank 0: estimates, from the tokens that the policy
        before the update sampled, of

        on_policy/kl_step: KL(policy before || policy after),
        on_policy/kl_to_start: KL(policy before || policy at the start of the run),

        in nats a token, at the sampling temperature (`kl_estimate`).
        """
        before = self._actor.scores
        after = self._actor.rescore(batch)
        with self._start_weights():
            start = self._actor.rescore(batch)
        if batch is None:
            return {}
        assert before is not None
        return {
            f"on_policy/{name}": kl_estimate((scores.logprobs - before.logprobs)[batch.loss_mask])
            for name, scores in (("kl_step", after), ("kl_to_start", start))
        }

    @contextmanager
    def _start_weights(self) -> Iterator[None]:
        parameters = list(_parameters(self._actor))
        current = [_to_host(parameter) for parameter in parameters]
        _fill(parameters, self._start)
        try:
            yield
        finally:
            _fill(parameters, current)


def _parameters(actor: Actor) -> Iterator[torch.Tensor]:
    for module in actor.modules:
        yield from module.parameters()


def _to_host(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True)


def _fill(parameters: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
