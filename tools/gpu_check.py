"""Are kernels and updates right and fast on this GPU? One command, a few minutes, no tests needed.

    python tools/gpu_check.py            # on the GPU
    python tools/gpu_check.py --cpu      # the same checks, small, on the CPU: does the tool work?

Checks every kernel that can run here against float64 on the CPU (groups of 1 to 4,096, sequences
of 0 to 131,072 tokens, offsets past 2**31, every dtype of buffers and masks), that it neither waits
for the device nor allocates, and that a CUDA graph captures it. Then times it with
benchmarks/advantages.py, and whole updates with benchmarks/update.py: MFU, and peak memory beside
the planner's. Writes all to benchmarks/results/advantages_gpu.md and update_gpu.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_opo.advantages import kernel
from megatron_opo.advantages.estimators import weighted_baseline

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
CASES = [  # group sizes, longest sequence
    ([4096, 1, 0, 700, 8], 60),
    ([8] * 64, 3000),
    ([1, 2, 3, 5, 8, 13], 131_072),
    ([1] * 500, 3),
]


def same(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for one rounding to the dtype of `got`, `right` being float64."""
    error = (got.double().cpu() - right).abs()
    smallest = torch.finfo(got.dtype).smallest_normal
    return bool((error <= torch.finfo(got.dtype).eps * right.abs() + 1e-12 + smallest).all())


def rewards_lengths_offsets(
    sizes: list[int], longest: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    count = int(offsets[-1])
    rewards = torch.randint(-8, 9, (count,), generator=generator) / 4
    lengths = torch.randint(0, longest + 1, (count,), generator=generator)
    lengths[count // 2] = longest
    lengths[::7] = 0
    return rewards, lengths, offsets


def check_ragged(device: str, shrink: int) -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(0)
    for sizes, longest in CASES:
        longest = max(2, longest // shrink)
        rewards, lengths, offsets = rewards_lengths_offsets(sizes, longest, generator)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + 5
        advantages = weighted_baseline(rewards, lengths, offsets)
        tokens = int(cu_seqlens[-1]) + 3
        inside = torch.repeat_interleave(advantages, lengths)
        for dtype in DTYPES:
            for masked in (False, True):
                mask = torch.rand(tokens, generator=generator) < 0.8
                right = torch.full((tokens,), 7.0, dtype=torch.float64)
                right[5:-3] = torch.where(mask[5:-3], inside, 0) if masked else inside
                for shift in (0, 1):  # from a multiple of 16 bytes
                    buffer = torch.full((tokens + 1,), 7.0, dtype=dtype, device=device)[shift:]
                    buffer = buffer[:tokens]
                    kernel.group_advantages_(
                        buffer,
                        *(t.to(device) for t in (rewards, lengths, offsets, cu_seqlens)),
                        mask=mask.to(device) if masked else None,
                    )
                    yield f"ragged {sizes[:6]} {dtype} masked={masked}", same(buffer, right)


def check_padded(device: str, shrink: int) -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(0)
    for rows, width, groups in ((64, 8192, 8), (40, 1001, 40), (4200, 64, 2), (8, 131_072, 1)):
        width = max(8, width // shrink)
        ids = torch.randint(0, groups, (rows,), generator=generator)
        order = ids.argsort(stable=True)
        offsets = torch.nn.functional.pad(ids.bincount(minlength=groups).cumsum(0), (1, 0))
        for dtype in DTYPES:
            for mask_dtype in MASK_DTYPES:
                lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
                mask = torch.arange(width) < lengths
                mask[::3] &= torch.rand(width, generator=generator) < 0.5
                rewards = torch.zeros(rows, width, dtype=dtype)
                places = torch.randint(0, width, (rows, 4), generator=generator)
                rewards.scatter_(1, places, torch.ones(rows, 4, dtype=dtype))
                sums = torch.where(mask, rewards, 0).double().sum(1)
                sequence = torch.empty(rows, dtype=torch.float64)
                sequence[order] = weighted_baseline(sums[order], mask.sum(1)[order], offsets)
                tokens = rewards.to(device)
                kernel.group_advantages_padded_(
                    tokens, mask.to(mask_dtype).to(device), ids.to(device)
                )
                right = torch.where(mask, sequence[:, None], 0)
                yield f"padded {rows} x {width} {dtype} {mask_dtype} mask", same(tokens, right)


def check_far_offsets(device: str) -> Iterator[tuple[str, bool]]:
    """4 GiB of tokens, so that an index of 32 bits would overflow."""
    start = 2**31 - 2000
    buffer = torch.zeros(2**31 + 7000, dtype=torch.bfloat16, device=device)
    kernel.group_advantages_(
        buffer,
        torch.tensor([1, 0], device=device),
        torch.tensor([1, 3], device=device),
        torch.tensor([0, 2], device=device),
        start + torch.tensor([0, 1000, 6000], device=device),
    )
    right = torch.zeros(9000, dtype=torch.float64)
    right[:1000], right[1000:6000] = 0.75, -0.25
    yield "offsets past 2**31", same(buffer[start:], right) and not buffer[:start].any()


def check_capture(device: str) -> Iterator[tuple[str, bool]]:
    """Neither operator waits or allocates, and a graph of both gives the same again."""
    rewards, weights = torch.tensor([1.0, 0.0], device=device), torch.ones(2, device=device)
    rewards, weights = rewards.double(), weights.double()
    offsets, cu_seqlens = (torch.tensor(x, device=device) for x in ([0, 2], [0, 700, 2000]))
    buffer = torch.empty(2000, device=device)
    tokens, mask = torch.zeros(2, 512, device=device), torch.ones(2, 512, device=device)
    groups = kernel.group_index(["a", "a"], device)
    workspace = torch.empty(3, 2, dtype=torch.float64, device=device)

    def both() -> None:
        kernel.group_advantages_(buffer, rewards, weights, offsets, cu_seqlens)
        kernel.group_advantages_padded_(tokens, mask, groups, workspace=workspace)

    both()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    both()
    torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    yield "no allocation, no wait", allocations == after
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    buffer.zero_()
    rewards.copy_(torch.tensor([3.0, 1.0]))
    tokens[0, 5] = 512.0
    tokens[1].zero_()
    graph.replay()
    right = torch.ones(2000, dtype=torch.float64)
    right[700:] = -1
    yield "captured by a graph, ragged", same(buffer, right)
    right = torch.tensor([256.0, -256.0], dtype=torch.float64)[:, None].expand(2, 512)
    yield "captured by a graph, padded", same(tokens, right)


def failures(checks: Iterator[tuple[str, bool]]) -> tuple[int, list[str]]:
    results = list(checks)
    return len(results), [name for name, right in results if not right]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the GPU kernels.")
    parser.add_argument("--cpu", action="store_true", help="small, on the CPU; prints only")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here (torch.cuda.is_available() is False); --cpu tries the tool")
        return 2
    text = "Too small for the bars: this shows that the tool works.\n\n" if options.cpu else ""
    wrong = 0
    for name in ("cpp", "torch") if options.cpu else ("triton", "cuda"):
        os.environ[kernel.VARIABLE] = name
        checks: list[Callable[[], Iterator[tuple[str, bool]]]] = [
            lambda: check_ragged(device, 64 if options.cpu else 1),
            lambda: check_padded(device, 64 if options.cpu else 1),
        ]
        if not options.cpu:
            checks += [lambda: check_far_offsets(device), lambda: check_capture(device)]
        text += f"## {name}\n\n"
        for check in checks:
            count, failed = failures(check())
            wrong += len(failed)
            text += f"- {count - len(failed)} of {count} checks right" + "".join(
                f"\n  - WRONG: {case}" for case in failed
            )
            text += "\n"
        text += f"\n{timings(device)}\n"
    print(text)
    update = benchmark("update.py", ["--quick"] if options.cpu else [])
    print(f"## An update\n\n{update}")
    if not options.cpu:
        RESULTS.mkdir(exist_ok=True)
        by = "By `python tools/gpu_check.py`."
        for name, title, found in (
            ("advantages_gpu.md", "Advantages on a GPU", text),
            ("update_gpu.md", "An update on a GPU", update),
        ):
            (RESULTS / name).write_text(f"# {title}\n\n{by}\n\n{found}")
            print(f"written to {RESULTS / name}")
    return 1 if wrong else 0


def timings(device: str) -> str:
    small = ["--sequences", "64", "--tokens", "128", "--rounds", "3"] if device == "cpu" else []
    return benchmark("advantages.py", ["--device", device, *small])


def benchmark(name: str, arguments: list[str]) -> str:
    """Its table, from a process of its own; bars that are missed are in it."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "table.md"
        command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        return out.read_text() if out.exists() else f"The benchmark failed:\n\n{done.stderr}"


if __name__ == "__main__":
    sys.exit(main())
