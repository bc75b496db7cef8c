"""Attention over packed sequences without Transformer Engine: linear in the number of short ones.

    python benchmarks/attention.py [--quick] [--rounds 5] [--length 64] [--device cuda]

Forward and backward of `packed_attention`, 4 heads over 2 key-value heads of 64 channels, float32
on the CPU and bfloat16 on CUDA, for 1x, 4x and 16x as many sequences whose lengths are spread
evenly up to twice --length; beside it, of the same tensors, a loop of one
scaled_dot_product_attention a sequence, one call in which all sequences are padded to the longest,
and one call over the pack as if it were one long sequence with a mask. In turns; the first round
does not count, of the others the best does. All are compared with attention in float64 first. The
bars: 16 times as many tokens take at most 20 times as long, and for the most sequences the padded
call takes longer. Exits with 1 when one is missed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_opo.actor.attention import packed_attention
from megatron_opo.actor.packing import Bounds

HEADS, KV_HEADS, CHANNELS = 4, 2, 64
SIZES = (1, 4, 16)
LINEAR_BAR = 1.25
OURS, LOOP, PADDED, MASKED = "packed_attention", "a loop", "padded", "one, masked"
# Memory of a mask over the whole pack, and of its scores, grows with the square of the tokens.
MOST_MASKED = 8192


@dataclass(frozen=True)
class Pack:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lengths: list[int]

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.query, self.key, self.value]

    @property
    def bounds(self) -> Bounds:
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).int().to(self.query.device)
        return Bounds(cu_seqlens, max(self.lengths))


def make_pack(sequences: int, length: int, device: str) -> Pack:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths = [1 + (2 * length - 1) * i // max(1, sequences - 1) for i in range(sequences)]
    lengths = [lengths[i] for i in torch.randperm(sequences, generator=generator)]
    query, key, value = (
        torch.randn(sum(lengths), heads, CHANNELS, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return Pack(query, key, value, lengths)


def packed(pack: Pack) -> torch.Tensor:
    return packed_attention(*pack.inputs, pack.bounds, pack.bounds)


def attend(query, key, value, **options) -> torch.Tensor:
    """[..., tokens, heads, channels], each sequence over itself."""
    query, key, value = (each.transpose(-2, -3) for each in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    return out.transpose(-2, -3)


def loop(pack: Pack) -> torch.Tensor:
    parts = zip(*(each.split(pack.lengths) for each in pack.inputs), strict=True)
    return torch.cat([attend(*each, is_causal=True) for each in parts])


def padded(pack: Pack) -> torch.Tensor:
    is_real = torch.arange(max(pack.lengths)) < torch.tensor(pack.lengths)[:, None]
    is_real = is_real.to(pack.query.device)
    batch = []
    for each in pack.inputs:
        rows = each.new_zeros(*is_real.shape, *each.shape[1:])
        batch.append(rows.masked_scatter(is_real[..., None, None], each))
    return attend(*batch, is_causal=True)[is_real]


def masked(pack: Pack) -> torch.Tensor:
    lengths = torch.tensor(pack.lengths, device=pack.query.device)
    sequence = torch.arange(len(pack.lengths), device=pack.query.device).repeat_interleave(lengths)
    return attend(*pack.inputs, attn_mask=(sequence[:, None] == sequence).tril())


CONTENDERS: dict[str, Callable[[Pack], torch.Tensor]] = {
    OURS: packed,
    LOOP: loop,
    PADDED: padded,
    MASKED: masked,
}


def passes(run: Callable[[Pack], torch.Tensor], pack: Pack) -> list[torch.Tensor]:
    """Output, and the gradients of the sum of its squares."""
    out = run(pack)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), pack.inputs)]


def check(device: str) -> float:
    """The largest error of any contender's number, as a share of the largest of its kind.

    Raises:
        SystemExit: it is more than rounding.
    """
    pack = make_pack(13, 20, device)
    exact = [each.detach().double().requires_grad_() for each in pack.inputs]
    outputs = []
    for query, key, value in zip(*(each.split(pack.lengths) for each in exact), strict=True):
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
        scores = torch.einsum("qhc,khc->hqk", query, key) / CHANNELS**0.5
        future = torch.ones(len(query), len(query), dtype=torch.bool, device=device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khc->qhc", weights, value))
    out = torch.cat(outputs)
    wanted = [out.detach(), *torch.autograd.grad(out.square().sum(), exact)]
    errors = {}
    for name, run in CONTENDERS.items():
        got = passes(run, pack)
        errors[name] = max(
            float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(got, wanted, strict=True)
        )
    if (worst := max(errors.values())) > (3e-2 if device == "cuda" else 1e-5):
        raise SystemExit(f"outputs or gradients are off by {errors}")
    return worst


def measure(packs: list[Pack], rounds: int) -> dict[tuple[str, int], list[float]]:
    """By contender and number of the pack: seconds of every round after one that does not count."""
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(1 + rounds):
        for i, pack in enumerate(packs):
            for name, run in CONTENDERS.items():
                if name == MASKED and sum(pack.lengths) > MOST_MASKED:
                    continue
                start = time.perf_counter()
                passes(run, pack)
                if pack.query.is_cuda:
                    torch.cuda.synchronize()
                if turn > 0:
                    found.setdefault((name, i), []).append(time.perf_counter() - start)
    return found


def table(packs: list[Pack], found: dict[tuple[str, int], list[float]]) -> tuple[str, bool]:
    best = {key: min(values) for key, values in found.items()}
    lines = [
        f"| sequences | tokens | {' | '.join(f'{name}, ms' for name in CONTENDERS)} "
        f"| {OURS}, ns a token |",
        f"|--:|--:|{'--:|' * (len(CONTENDERS) + 1)}",
    ]
    for i, pack in enumerate(packs):
        tokens = sum(pack.lengths)
        shown = [f"{best[n, i] * 1e3:.1f}" if (n, i) in best else "-" for n in CONTENDERS]
        lines.append(
            f"| {len(pack.lengths)} | {tokens:,} | {' | '.join(shown)} "
            f"| {best[OURS, i] / tokens * 1e9:,.0f} |"
        )
    last = len(packs) - 1
    tokens = sum(packs[last].lengths) / sum(packs[0].lengths)
    growth = best[OURS, last] / best[OURS, 0]
    of_padded = best[OURS, last] / best[PADDED, last]
    bars = {
        f"time for {tokens:.1f} times the tokens, in times": (LINEAR_BAR * tokens, growth),
        f"time for {len(packs[last].lengths)} sequences, in times of padded": (1.0, of_padded),
    }
    lines += ["", "| bar | wanted | measured | |", "|---|--:|--:|---|"]
    for name, (limit, value) in bars.items():
        verdict = "met" if value <= limit else "MISSED"
        lines.append(f"| {name} | <= {limit:.1f} | {value:.2f} | {verdict} |")
    return "\n".join(lines), all(value <= limit for limit, value in bars.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention over packed sequences.")
    parser.add_argument("--sequences", type=int, default=16, help="of the smallest pack")
    parser.add_argument("--length", type=int, default=64, help="mean tokens of a sequence")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="4 to 64 sequences, 2 rounds")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.sequences, options.rounds = 4, 2
    worst = check(options.device)
    packs = [make_pack(n * options.sequences, options.length, options.device) for n in SIZES]
    result, met = table(packs, measure(packs, options.rounds))
    text = (
        f"Sequences of 1 to {2 * options.length} tokens, {HEADS} heads over {KV_HEADS} of "
        f"{CHANNELS} channels; largest error against float64 {worst:.0e}.\n"
        f"Device: {options.device}; cores: {len(os.sched_getaffinity(0))}, threads of torch: "
        f"{torch.get_num_threads()}; torch {torch.__version__}.\n\n"
        f"    python benchmarks/attention.py --sequences {options.sequences} --length "
        f"{options.length} --device {options.device} --rounds {options.rounds}\n\n{result}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
