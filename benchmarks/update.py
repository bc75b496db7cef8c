"""How fast an update is on this device, and whether it takes the memory that was planned.

    python benchmarks/update.py [--quick] [--micro-batches 2] [--rounds 5] [--out table.md]

One rank trains a model of the shape of Qwen3-1.7B with random weights, in bfloat16 with full
recomputation off, on a rollout of random tokens: micro-batches of 16,384 tokens in sequences of
2,048, each with a prompt of 256. MFU counts the forward and twice that for the backward pass, only
pairs of tokens that attend to each other, and logits of scored tokens once; it stands beside the
device's published peak. Peak memory is what torch had allocated, beside `megatron-opo plan`'s
figure without its reserves. The first update does not count. On a CPU (where --quick is what fits,
in float32) there is neither a peak to compare with nor a count of memory.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_opo.actor.parallel import Parallel, initialize
from megatron_opo.actor.step import Actor
from megatron_opo.advantages import group_advantages_
from megatron_opo.batch import Group, PackedBatch, Prompt, Sample, pack
from megatron_opo.plan.flops import forward_flops
from megatron_opo.plan.hardware import peak_flops
from megatron_opo.plan.layout import layout_of, model_of
from megatron_opo.plan.memory import trainer_memory
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import load_recipe
from megatron_opo.spmd import Driver
from megatron_opo.weights.hf_config import read_architecture

MFU_BAR, MEMORY_BAR = 0.45, 0.1
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
RECIPE = """
name: update
run_dir: {directory}/run
model: {{path: {directory}, dtype: {dtype}}}
data: {{train: {{files: [unused.jsonl]}}, max_prompt_tokens: {prompt}}}
rollout: {{max_response_tokens: {response}}}
actor: {{micro_batch_tokens: {tokens}}}
optimizer: {{lr: 1e-6}}
algorithm: {{max_logprob_gap: 1000, mean_logprob_gap: 1000}}
train: {{steps: 1000}}
"""


@dataclass(frozen=True)
class Size:
    """`tokens` in a micro-batch, of sequences of `prompt` and `response` tokens."""

    shape: dict
    tokens: int
    prompt: int
    response: int
    micro_batches: int

    @property
    def sequences(self) -> int:
        return self.tokens * self.micro_batches // (self.prompt + self.response)


def make_rollout(size: Size) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(size.shape["vocab_size"], (count,), generator=generator).tolist()
        )

    groups = []
    for k in range(size.sequences // 4):
        samples = tuple(
            Sample(
                group_id=str(k),
                index=i,
                response_ids=ids(size.response),
                logprobs=(-1.0,) * size.response,
                versions=(0,) * size.response,
                finish_reason="stop",
                text="",
                reward=float(i % 2),
            )
            for i in range(4)
        )
        groups.append(Group(Prompt(str(k), ids(size.prompt), "", "random", None), samples))
    batch = pack(groups)
    group_advantages_(batch)
    return batch


def open_actor(recipe: Recipe, config: dict, parallel: Parallel) -> Actor:
    """With weights drawn as a model's are before it is trained."""
    actor = Actor(recipe, config, parallel, Driver(parallel.rank, parallel.control))
    generator = torch.Generator(parallel.device).manual_seed(0)
    for module in actor.modules:
        for parameter in module.parameters():
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0, 0.02, generator=generator)
    actor.weights_loaded()
    return actor


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(actor: Actor, batch: PackedBatch, rounds: int) -> tuple[list[float], int]:
    """Seconds of every update but the first, and bytes that torch had allocated at the peak."""
    device, seconds = actor.parallel.device, []
    for step in range(1 + rounds):
        wait(device)
        start = time.perf_counter()
        actor.update(batch, step)
        wait(device)
        seconds.append(time.perf_counter() - start)
        if step == 0 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return seconds[1:], peak


def table(
    size: Size, recipe: Recipe, config: dict, seconds: list[float], peak: int, device: torch.device
) -> tuple[str, bool]:
    model = model_of(read_architecture(config))
    length = size.prompt + size.response
    scored = size.sequences * size.response
    flops = forward_flops(model, [length] * size.sequences, scored).model
    median = statistics.median(seconds)
    tokens = size.sequences * length
    lines = [
        f"{model.parameters / 1e9:.3g}B parameters, {size.micro_batches} micro-batches of "
        f"{size.tokens} tokens; torch {torch.__version__}.",
        "",
        "| what | measured |",
        "|---|--:|",
        f"| seconds of an update, median of {len(seconds)} | {median:.3f} |",
        f"| tokens a second | {tokens / median:,.0f} |",
        f"| TFLOP/s | {flops / median / 1e12:.3g} |",
    ]
    met = True
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        lines.insert(1, f"Device: {name}.")
        if peak_rate := peak_flops(name):
            mfu = flops / median / peak_rate
            met &= mfu >= MFU_BAR
            lines.append(f"| MFU (bar {MFU_BAR:.0%}) | {mfu:.1%} |")
        stage = trainer_memory(model, recipe, layout_of(recipe, 1), size.micro_batches, 1)[0]
        planned = stage.total - stage.reserve - stage.bucket
        met &= abs(peak / planned - 1) <= MEMORY_BAR
        lines += [
            f"| peak memory, GiB | {peak / 2**30:.2f} |",
            f"| planned, GiB (bar: within {MEMORY_BAR:.0%}) | {planned / 2**30:.2f} |",
        ]
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(description="Time updates; MFU and peak memory.")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small model, 2 rounds")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    size = Size(SHAPE, 16_384, 256, 1792, options.micro_batches)
    if options.quick:
        size = Size(SHAPE | SMALL, 1024, 32, 224, options.micro_batches)
        options.rounds = 2
    with tempfile.TemporaryDirectory(prefix="update-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(size.shape))
        path = Path(directory) / "recipe.yaml"
        text = RECIPE.format(
            directory=directory,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            prompt=size.prompt,
            response=size.response,
            tokens=size.tokens,
        )
        path.write_text(text)
        recipe = load_recipe(path, [])
        parallel = initialize(recipe.actor, seed=0)
        actor = open_actor(recipe, size.shape, parallel)
        seconds, peak = measure(actor, make_rollout(size), options.rounds)
    result, met = table(size, recipe, size.shape, seconds, peak, parallel.device)
    command = f"    python benchmarks/update.py --micro-batches {size.micro_batches}"
    result = f"{command} --rounds {options.rounds}\n\n{result}\n"
    print(result)
    if options.out:
        options.out.write_text(result)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
