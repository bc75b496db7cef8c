"""How fast advantages are written, against moving the same bytes and against a loop over samples.

    python benchmarks/advantages.py [--quick] [--device cuda] [--out table.md]

Everything is timed in turns in one run, the best of several rounds counts, and each bar is a ratio
of two of these times. Where other work runs on the machine, set OMP_NUM_THREADS=1. "A loop" is what
trainers commonly do: a dictionary of lists, one small tensor operation for each sample, new
token-level tensors. Exits with 1 when a bar is missed.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_opo.advantages import kernel

GROUP = 8
MASKS = (torch.bool, torch.float32, torch.int64)


@dataclass(frozen=True)
class Timed:
    """One contender. `moves`: bytes it has to move at least."""

    name: str
    run: Callable[[], object]
    moves: int
    rounds: int


@dataclass(frozen=True)
class Bar:
    """`name` may take at most `limit` times as long as `reference`, or must be as often faster."""

    name: str
    reference: str
    limit: float
    faster: bool = False


def loop_baselines(scores: torch.Tensor, lengths: torch.Tensor, ids: list[str]) -> torch.Tensor:
    """OPO's advantages [N], sample by sample."""
    members = defaultdict(list)
    for row, name in enumerate(ids):
        members[name].append(row)
    baselines = {}
    for name, rows in members.items():
        r = torch.stack([scores[row] for row in rows])
        n = torch.stack([lengths[row] for row in rows]).float()
        baselines[name] = (n * r).sum() / n.sum()
    advantages = scores.clone()
    for row, name in enumerate(ids):
        advantages[row] = scores[row] - baselines[name]
    return advantages


def loop_padded(rewards: torch.Tensor, mask: torch.Tensor, ids: list[str]) -> torch.Tensor:
    advantages = loop_baselines(rewards.sum(-1), mask.sum(-1), ids)
    return advantages.unsqueeze(-1) * mask


def loop_ragged(buffer, rewards, lengths, bounds: list[int], ids: list[str]) -> torch.Tensor:
    advantages = loop_baselines(rewards, lengths, ids)
    flat = torch.empty_like(buffer)
    for row in range(len(ids)):
        flat[bounds[row] : bounds[row + 1]] = advantages[row]
    return flat


def copy_of(size: int, device: str) -> Callable[[], object]:
    """copy_ that moves `size` bytes: it reads half of them and writes half of them."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def ragged_contenders(rows: int, width: int, device: str, rounds: int) -> list[Timed]:
    lengths = torch.full((rows,), width)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    offsets = torch.arange(0, rows + 1, GROUP)
    rewards = torch.arange(rows).remainder(3).double()
    buffer = torch.empty(rows * width, device=device)
    mask = (torch.arange(rows * width, device=device) % 7 > 0).view(torch.bool)
    ids = [str(row // GROUP) for row in range(rows)]
    arguments = [t.to(device) for t in (rewards, lengths.double(), offsets, cu_seqlens)]
    on_device = (rewards.float().to(device), lengths.to(device))
    bounds = cu_seqlens.tolist()
    size, tokens = 4 * rows * width, rows * width
    return [
        Timed("fill_", lambda: buffer.fill_(1.0), size, rounds),
        Timed("ragged", lambda: kernel.group_advantages_(buffer, *arguments), size, rounds),
        Timed("copy_ for ragged", copy_of(size, device), size, rounds),
        Timed(
            "ragged, mask",
            lambda: kernel.group_advantages_(buffer, *arguments, mask=mask),
            size + tokens,
            rounds,
        ),
        Timed("copy_ for ragged, mask", copy_of(size + tokens, device), size + tokens, rounds),
        Timed("ragged, a loop", lambda: loop_ragged(buffer, *on_device, bounds, ids), size, 2),
    ]


def padded_contenders(
    rows: int, width: int, device: str, rounds: int, mask_dtype: torch.dtype
) -> list[Timed]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).to(mask_dtype).to(device)
    rewards = torch.zeros(rows, width, device=device)
    ids = [str(row // GROUP) for row in range(rows)]
    groups = kernel.group_index(ids, device)
    workspace = torch.empty(3, rows, dtype=torch.float64, device=device)
    name = str(mask_dtype).removeprefix("torch.")
    size = rewards.numel() * (8 + mask.element_size())

    def ours() -> None:
        kernel.group_advantages_padded_(rewards, mask, groups, workspace=workspace)

    def plain() -> None:
        chosen = os.environ.get(kernel.VARIABLE, "")
        os.environ[kernel.VARIABLE] = "torch"
        ours()
        os.environ[kernel.VARIABLE] = chosen

    return [
        Timed(f"padded, {name} mask", ours, size, rounds),
        Timed(f"copy_ for {name} mask", copy_of(size, device), size, rounds),
        Timed(f"padded, {name} mask, plain torch", plain, size, 3),
        Timed(f"padded, {name} mask, a loop", lambda: loop_padded(rewards, mask, ids), size, 2),
    ]


def bars(device: str) -> list[Bar]:
    masks = [str(dtype).removeprefix("torch.") for dtype in MASKS]
    if device == "cuda":
        at_memory = [Bar("ragged", "copy_ for ragged", 1 / 0.9)]
        at_memory += [Bar("ragged, mask", "copy_ for ragged, mask", 1 / 0.9)]
        at_memory += [Bar(f"padded, {m} mask", f"copy_ for {m} mask", 1 / 0.9) for m in masks]
        ragged_speedup = padded_speedup = 100.0
    else:
        at_memory = [Bar("ragged", "fill_", 1.5)]
        at_memory += [Bar(f"padded, {m} mask", f"copy_ for {m} mask", 1.5) for m in masks]
        ragged_speedup, padded_speedup = 20.0, 5.0
    return [
        *at_memory,
        Bar("ragged", "ragged, a loop", ragged_speedup, faster=True),
        *(
            Bar(f"padded, {m} mask", f"padded, {m} mask, a loop", padded_speedup, faster=True)
            for m in masks
        ),
    ]


def take_turns(contenders: list[Timed], device: str) -> dict[str, list[float]]:
    """Seconds of every round of each, after one that does not count."""
    clock = _cuda_seconds if device == "cuda" else _seconds
    runs = {c.name: (_graph(c) if device == "cuda" and c.rounds > 3 else c.run) for c in contenders}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for turn in range(max(c.rounds for c in contenders)):
        for contender in contenders:
            if turn < contender.rounds:
                times[contender.name].append(clock(runs[contender.name]))
    return times


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _graph(contender: Timed) -> Callable[[], object]:
    """Without what Python costs: the launches alone. Also shows that they can be captured."""
    contender.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contender.run()
    return graph.replay


def table(contenders: list[Timed], times: dict[str, list[float]], device: str) -> tuple[str, bool]:
    lines = ["| what | best ms | median ms | GB/s |", "|---|--:|--:|--:|"]
    for c in contenders:
        best, middle = min(times[c.name]), statistics.median(times[c.name])
        lines.append(
            f"| {c.name} | {best * 1e3:.3f} | {middle * 1e3:.3f} | {c.moves / best / 1e9:.1f} |"
        )
    lines += ["", "| bar | wanted | measured | |", "|---|--:|--:|---|"]
    all_met = True
    for bar in bars(device):
        ratio = min(times[bar.name]) / min(times[bar.reference])
        if bar.faster:
            met, text = 1 / ratio >= bar.limit, "times as fast as"
            wanted, measured = f">= {bar.limit:g}", f"{1 / ratio:.1f}"
        else:
            met, text = ratio <= bar.limit, "takes, in times of"
            wanted, measured = f"<= {bar.limit:.2f}", f"{ratio:.2f}"
        all_met &= met
        verdict = "met" if met else "MISSED"
        lines.append(f"| {bar.name}: {text} {bar.reference} | {wanted} | {measured} | {verdict} |")
    return "\n".join(lines), all_met


def describe(device: str) -> str:
    module = kernel.implementation(torch.device(device)).__name__.rsplit(".", 1)[-1]
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")
        cores = len(os.sched_getaffinity(0))
        threads = torch.get_num_threads()
        machine = f"{model or platform.machine()}, cores: {cores}, threads of torch: {threads}"
    return f"{machine}; torch {torch.__version__}; {module}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the advantage kernel.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--tokens", type=int, help="a sequence; 2048 on the CPU, 8192 on CUDA")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="7 rounds")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    rows, rounds = options.sequences, 7 if options.quick else options.rounds
    width = options.tokens or (8192 if options.device == "cuda" else 2048)

    contenders, times = [], {}
    for case in (None, *MASKS):  # one after the other: each needs gigabytes on a GPU
        if case is None:
            these = ragged_contenders(rows, width, options.device, rounds)
        else:
            these = padded_contenders(rows, width, options.device, rounds, case)
        times |= take_turns(these, options.device)
        contenders += [replace(c, run=lambda: None) for c in these]
        del these
    text, met = table(contenders, times, options.device)
    text = (
        f"{rows:,} sequences of up to {width:,} tokens in groups of {GROUP}, float32.\n"
        f"{describe(options.device)}.\n\n"
        f"    python benchmarks/advantages.py --device {options.device} --sequences {rows} "
        f"--tokens {width} --rounds {rounds}\n\n{text}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
