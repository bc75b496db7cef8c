"""Token logprobs in chunks, against whole logits: time and peak memory, forward and backward.

    python benchmarks/logprobs.py [--quick] [--tokens 2048] [--rounds 5] [--out FILE]

From the same hidden states and output layer, float32 on the CPU and bfloat16 on CUDA:
`token_logprobs` (logits of 1,024 tokens at a time, made again in the backward pass) with logprob,
entropy and sum of squared probabilities of every token; and the plain way, all logits in float32,
log_softmax and gather, without and with the entropy. In turns; the first round does not count.
Memory is what exists at the peak of one pass beside hidden states, weight and targets, counted by
the sizes of the tensors themselves. Both give the same logprobs and gradients, which is checked
against float64 first. The bar is that peak as a share of the plain way's with entropy: at most 1/4
where there are 8 chunks or more. Exits with 1 when it is missed.
"""

import argparse
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_opo.actor.logprobs import token_logprobs

VOCABULARY, HIDDEN, CHUNK = 128_256, 64, 1024
BAR = 1 / 4
OURS, PLAIN, PLAIN_ENTROPY = "in chunks", "whole logits", "whole logits, entropy, too"


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that are made inside it: those alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = {_key(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        for tensor in filter(_is_tensor, tree_leaves(result)):
            if (key := _key(tensor)) not in self.alive and key not in before:
                storage = tensor.untyped_storage()
                self.alive[key] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._end, key)
        return result

    def _end(self, key: int) -> None:
        self.bytes -= self.alive.pop(key)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def in_chunks(hidden, weight, targets) -> torch.Tensor:
    return token_logprobs(
        hidden,
        weight,
        targets,
        temperature=1.0,
        vocab_size=weight.shape[0],
        chunk_tokens=CHUNK,
    ).logprobs


def whole(hidden, weight, targets) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def whole_with_entropy(hidden, weight, targets) -> torch.Tensor:
    logprobs = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0]


CONTENDERS = {OURS: in_chunks, PLAIN: whole, PLAIN_ENTROPY: whole_with_entropy}


def make_inputs(tokens: int, vocabulary: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    floats = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
    return [*floats, targets.to(device)]


def passes(function: Callable, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Logprobs, and the gradients of their mean."""
    logprobs = function(*inputs)
    return logprobs.detach(), *torch.autograd.grad(logprobs.mean(), inputs[:2])


def check(device: str) -> float:
    """The largest error of any number, as a share of the largest number of its kind.

    Raises:
        SystemExit: it is more than rounding.
    """
    inputs = make_inputs(2 * CHUNK + 5, 999, device)
    exact = [each.detach().double().requires_grad_() for each in inputs[:2]]
    truth = exact[0] @ exact[1].t()
    truth = truth.log_softmax(-1).gather(-1, inputs[2][:, None])[:, 0]
    wanted = (truth.detach(), *torch.autograd.grad(truth.mean(), exact))
    worst = 0.0
    for got, value in zip(passes(in_chunks, inputs), wanted, strict=True):
        worst = max(worst, float((got.double() - value).abs().max() / value.abs().max()))
    if worst > (2e-2 if device == "cuda" else 1e-5):
        raise SystemExit(f"logprobs or gradients are off by {worst:.1e}")
    return worst


def measure(inputs: list[torch.Tensor], rounds: int) -> dict[str, tuple[list[float], int]]:
    """Seconds of every round of each, after one that does not count, and bytes at the peak."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peaks = {}
    for name, function in CONTENDERS.items():
        with Allocations() as allocations:
            passes(function, inputs)
        peaks[name] = allocations.peak
    for _ in range(rounds):
        for name, function in CONTENDERS.items():
            start = time.perf_counter()
            passes(function, inputs)
            if inputs[0].is_cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: (seconds[name], peaks[name]) for name in CONTENDERS}


def table(found: dict[str, tuple[list[float], int]], chunks: int) -> tuple[str, bool]:
    plain_seconds = statistics.median(found[PLAIN_ENTROPY][0])
    plain_peak = found[PLAIN_ENTROPY][1]
    lines = [
        "| what | median s | peak memory, GB | s, share | memory, share | all rounds, s |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, (seconds, peak) in found.items():
        median = statistics.median(seconds)
        rounds = ", ".join(f"{each:.2f}" for each in seconds)
        lines.append(
            f"| {name} | {median:.2f} | {peak / 1e9:.2f} | {median / plain_seconds:.2f} "
            f"| {peak / plain_peak:.2f} | {rounds} |"
        )
    share = found[OURS][1] / plain_peak
    met = share <= BAR or chunks < 8
    if chunks >= 8:
        verdict = "met" if met else "MISSED"
        lines += ["", f"Bar: at most {BAR:g} of the memory: {share:.3f}, {verdict}."]
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(description="Logprobs in chunks against whole logits.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1,200 tokens of 9,000 words, 1 round")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.vocabulary, options.rounds = 1200, 9000, 1
    worst = check(options.device)
    found = measure(make_inputs(options.tokens, options.vocabulary, options.device), options.rounds)
    result, met = table(found, -(-options.tokens // CHUNK))
    text = (
        f"{options.tokens:,} tokens, hidden size {HIDDEN}, a vocabulary of {options.vocabulary:,}; "
        f"largest error against float64 {worst:.0e}.\n"
        f"Device: {options.device}; cores: {len(os.sched_getaffinity(0))}, threads of torch: "
        f"{torch.get_num_threads()}; torch {torch.__version__}.\n\n"
        f"    python benchmarks/logprobs.py --tokens {options.tokens} --vocabulary "
        f"{options.vocabulary} --device {options.device} --rounds {options.rounds}\n\n{result}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
