"""What an actor needs on its device only while it updates: gradients and optimizer state.

Weights stay, as they are exported and scored with at any time.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer


class UpdateMemory:
    """Gives the memory of gradients and optimizer state away between updates, and takes it back.

    While it is away the optimizer's state lies on the host, where it can be read (and saved) but
    not stepped, and the gradients have no memory at all. Nothing changes by a bit.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer):
        self._model = model
        self._optimizer = optimizer
        self._device = next(model[0].parameters()).device
        # Kept for the next time: pinned memory is slow to get.
        self._on_host: dict[int, torch.Tensor] = {}
        self.is_away = False

    def give_away(self) -> None:
        """Without effect when it is away."""
        if self.is_away:
            return
        self._optimizer.zero_grad()
        tensors = list(state_tensors(self._model, self._optimizer))
        for tensor in tensors:
            self._host_copy(tensor).copy_(tensor.data, non_blocking=True)
        torch.cuda.synchronize()
        for tensor in tensors:
            tensor.data = self._on_host[id(tensor)]
        with _without_deprecations():
            for chunk in self._model:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        # What only the allocator holds is of no use to another process.
        torch.cuda.empty_cache()
        self.is_away = True

    def take_back(self) -> None:
        """Without effect when it is not away. Gradients are zero afterwards."""
        if not self.is_away:
            return
        for tensor in state_tensors(self._model, self._optimizer):
            here = torch.empty_like(tensor.data, device=self._device)
            tensor.data = here.copy_(tensor.data, non_blocking=True)
        with _without_deprecations():
            for chunk in self._model:
                chunk.restore_grad_buffers()
        self.is_away = False

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._on_host.get(id(tensor))
        if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
            pinned = self._device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._on_host[id(tensor)] = host
        return host


def state_tensors(
    model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> Iterator[torch.Tensor]:
    """Main parameters and moments on this rank, but for what is a view of a model's weights."""
    weights = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
    chained = isinstance(optimizer, ChainedOptimizer)
    for part in optimizer.chained_optimizers if chained else [optimizer]:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in weights:
                    yield parameter
        for state in part.optimizer.state.values():
            for value in state.values():
                # A count of steps is a single number, which some optimizers want on the CPU.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield value


def _without_deprecations() -> warnings.catch_warnings:
    """Megatron resizes its buffers by a name of torch's that prints a warning."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
