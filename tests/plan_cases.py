"""What a trainer's ranks really hold and save; run inside the ranks."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Allocations(TorchDispatchMode):
    """Bytes of the tensors made inside it: those alive, and their peak. What is `known` before is
    not counted."""

    def __init__(self, known: list[torch.Tensor] = ()):
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.bytes -= self.alive.pop(key)


def measure(model: str, run_dir: str, lengths: list[int], overrides: list[str]) -> dict[str, Any]:
    """Elements and bytes on this rank, measured on the objects themselves, after a step. Without a
    pipeline also `saved`, what autograd holds after a forward pass over sequences of these lengths;
    `peak` of a forward and backward pass beside parameters and gradient buffers; and `flops` of
    both, as torch counts them. With one, `micro_batches` of the step and `in_flight`, the most
    passes of a chunk of layers that awaited their backward pass. `bucket` is what the rank has for
    servers on its node. `update_flops` are those of the step as torch counts them, `said_flops` as
    its metrics say for all ranks; it was on a `batch` of such lengths and so many scored tokens."""
    from actor_cases import make_rollout, open_actor

    from megatron_opo.train import open_shared_bucket

    # With the operations that GPUs have, too, which is what plans are of.
    actor = open_actor(model, run_dir, ["rollout.deterministic=false", *overrides])
    result: dict[str, Any] = {}
    if actor.parallel.pp_size == 1:
        result |= _measure_a_pass(actor, lengths)
    batch = make_rollout(actor.hf_config["vocab_size"]) if actor.driver.is_here else None
    scores = actor.score(batch)
    if batch is not None:
        batch = replace(batch, rollout_logprobs=scores.logprobs)
    passes = _Passes(actor)
    with FlopCounterMode(display=False) as counter:
        metrics = actor.update(batch, version=0)
    result["update_flops"] = counter.get_total_flops()
    if batch is not None:
        assert "perf/mfu" not in metrics, "of a CPU nobody knows the peak"
        seconds = batch.tokens.numel() / metrics["perf/update_tokens_per_second"]
        of_rank = metrics["perf/update_tflops_per_rank"] * 1e12 * seconds
        result["said_flops"] = of_rank * actor.parallel.world_size
        result["batch"] = batch.sequence_lengths.tolist(), int(batch.loss_mask.sum())
    if actor.parallel.pp_size > 1:
        result |= {"micro_batches": passes.count / len(actor.modules), "in_flight": passes.most}
    shared = open_shared_bucket(actor.recipe, actor.hf_config, actor.parallel)
    assert shared is not None
    bucket = 0 if shared._buffer is None else shared._buffer.nbytes
    shared.close()
    buffers = [
        buffer
        for chunk in actor.model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    parameters = [p for module in actor.modules for p in module.parameters()]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return result | {
        "stage": actor.parallel.pp_rank,
        "bucket": bucket,
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(storages.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": _optimizer_bytes(actor.optimizer, set(storages)),
    }


class _Passes:
    """Counts forward passes with gradients, and those whose backward pass has not begun."""

    def __init__(self, actor):
        self.count, self.waiting, self.most = 0, 0, 0
        for module in actor.modules:
            module.register_forward_hook(self._forward)

    def _forward(self, module, arguments, output: torch.Tensor) -> None:
        if output.requires_grad:
            self.count += 1
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            output.register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> None:
        self.waiting -= 1


def _measure_a_pass(actor, lengths: list[int]) -> dict[str, float]:
    from megatron_opo.actor.packing import MicroBatch, Sharing, rows_of

    module = actor.modules[0]
    parameters = list(module.parameters())
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    parallel = actor.parallel
    total = len(rows_of(bounds, Sharing(parallel.cp_rank, parallel.cp_size)))
    tokens = torch.randint(1, 90, (total,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(total - 1)
    micro_batch = MicroBatch(tokens, bounds, rows, tokens[1:].clone(), rows, torch.zeros_like(rows))
    packed = micro_batch.packed_seq_params(torch.device("cpu"))
    own = {p.untyped_storage().data_ptr() for p in parameters}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = module(input_ids=tokens[None], packed_seq_params=packed)
    bytes_saved = sum(saved.values())
    del hidden
    known = [tokens, *parameters, *(p.main_grad for p in parameters)]
    with FlopCounterMode(display=False) as counter, Allocations(known) as allocations:
        hidden = module(input_ids=tokens[None], packed_seq_params=packed)
        scores = actor._score_rows(hidden, actor.model[0], micro_batch)
        scores.logprobs.sum().backward()
    return {
        "saved": bytes_saved,
        "peak": allocations.peak,
        "flops": counter.get_total_flops(),
    }


def _optimizer_bytes(optimizer, model_storages: set[int]) -> int:
    """Adam's moments, and main parameters that are not the model's own."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in model_storages:
                    total += parameter.nbytes
                state = inner.state[parameter]
                total += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    return total
