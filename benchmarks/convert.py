"""How fast models are converted, against copying their files.

    python benchmarks/convert.py [--quick] [--gigabytes 4] [--rounds 5] [--dir DIR] [--out table.md]

A Llama of random bfloat16 weights is made in a temporary directory. Then it is copied, converted to
a Megatron checkpoint and back, all in turns in one run, with everything flushed to the disk at the
end of each; what is read was written or read just before, so mostly it comes from memory. The first
round does not count. The bar is the ratio of a conversion's median time to that of `cp`. Memory is
what the process has at the peak beyond what it had before the first conversion. Exits with 1 when a
bar is missed.
"""

import argparse
import filecmp
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_opo.weights.checkpoint import open_checkpoint
from megatron_opo.weights.families import Architecture
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import hf_tensors, open_megatron
from megatron_opo.weights.megatron_save import save_megatron
from megatron_opo.weights.save import save_hf
from megatron_opo.weights.streaming import flush_to_disk

BAR = 1.5
REFERENCE = "cp"
HF_TO_HF = "Hugging Face, read and saved"
HF_TO_MEGATRON = "Hugging Face -> Megatron"
MEGATRON_TO_HF = "Megatron -> Hugging Face"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def architecture_of(gigabytes: float) -> tuple[dict, Architecture]:
    """As many layers as come nearest to that size in bfloat16, but at least one."""
    sizes = []
    for layers in (1, 2):
        config = CONFIG | {"num_hidden_layers": layers}
        sizes.append(sum(torch.Size(s).numel() * 2 for s in shapes(config).values()))
    extra = (gigabytes * 1e9 - sizes[0]) / (sizes[1] - sizes[0])
    config = CONFIG | {"num_hidden_layers": 1 + max(0, round(extra))}
    return config, read_architecture(config)


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    return read_architecture(config).hf_shapes()


def make_model(directory: Path, config: dict) -> Path:
    (directory / "config").mkdir()
    (directory / "config" / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = (
        (name, torch.randn(shape, generator=generator).mul_(0.02).bfloat16())
        for name, shape in shapes(config).items()
    )
    save_hf(directory / "model", weights, source=directory / "config")
    return directory / "model"


def copy_by_cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    flush_to_disk([*target.iterdir(), target])


def copy_by_python(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    flush_to_disk([*target.iterdir(), target])


def read_and_save(source: Path, target: Path, architecture: Architecture) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in architecture.hf_shapes():
            yield name, checkpoint.read(name, None, 0, 0)

    with ExitStack() as stack:
        checkpoint = open_checkpoint(source, stack)
        save_hf(target, weights(), source=source)


def to_hf(megatron: Path, target: Path, architecture: Architecture) -> None:
    weights = hf_tensors(open_megatron(megatron, architecture), None)
    save_hf(target, weights, source=megatron / "hf")


def measure(run: Callable[[], object], before: int) -> tuple[float, float]:
    """Seconds, and megabytes at the peak of this process's memory above `before` (bytes)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return seconds, (memory("VmHWM") - before) / 1e6


def memory(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def take_turns(
    source: Path, directory: Path, architecture: Architecture, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds and megabytes of every round of each, after one that does not count."""
    megatron, target = directory / "megatron", directory / "target"
    before = memory("VmRSS")
    save_megatron(megatron, source)
    contenders: dict[str, Callable[[], object]] = {
        REFERENCE: lambda: copy_by_cp(source, target),
        "shutil.copyfile": lambda: copy_by_python(source, target),
        HF_TO_HF: lambda: read_and_save(source, target, architecture),
        HF_TO_MEGATRON: lambda: save_megatron(target, source),
        MEGATRON_TO_HF: lambda: to_hf(megatron, target, architecture),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(1 + rounds):
        for name, run in contenders.items():
            found[name].append(measure(run, before))
            if name == MEGATRON_TO_HF:
                check_equal(source, target)
            shutil.rmtree(target)
    return {name: values[1:] for name, values in found.items()}


def check_equal(source: Path, target: Path) -> None:
    files = [path.name for path in source.glob("*.safetensors")]
    _, different, missing = filecmp.cmpfiles(source, target, files, shallow=False)
    if different or missing:
        raise SystemExit(f"after the way to Megatron and back, {different + missing} differ")


def table(found: dict[str, list[tuple[float, float]]], gigabytes: float) -> tuple[str, bool]:
    medians = {name: statistics.median(s for s, _ in values) for name, values in found.items()}
    lines = [
        "| what | median s | GB/s | times of `cp` | peak memory MB | all rounds, s |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, values in found.items():
        is_copy = name in (REFERENCE, "shutil.copyfile")
        lines.append(
            f"| {name} | {medians[name]:.2f} | {gigabytes / medians[name]:.2f} "
            f"| {medians[name] / medians[REFERENCE]:.2f} "
            f"| {'' if is_copy else f'{max(mb for _, mb in values):.0f}'} "
            f"| {', '.join(f'{seconds:.2f}' for seconds, _ in values)} |"
        )
    lines += ["", "| bar | wanted | measured | |", "|---|--:|--:|---|"]
    all_met = True
    for name in (HF_TO_MEGATRON, MEGATRON_TO_HF):
        ratio = medians[name] / medians[REFERENCE]
        all_met &= ratio <= BAR
        verdict = "met" if ratio <= BAR else "MISSED"
        lines.append(f"| {name}: takes, in times of cp | <= {BAR} | {ratio:.2f} | {verdict} |")
    return "\n".join(lines), all_met


def main() -> int:
    parser = argparse.ArgumentParser(description="Time conversions against copies.")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="0.3 GB, 2 rounds")
    parser.add_argument("--dir", type=Path, help="where to write; by default the system's choice")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.gigabytes, options.rounds = 0.3, 2

    config, architecture = architecture_of(options.gigabytes)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="convert-") as name:
        source = make_model(Path(name), config)
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
        found = take_turns(source, Path(name), architecture, options.rounds)
    text, met = table(found, size)
    text = (
        f"A Llama of {size:.2f} GB in bfloat16 ({config['num_hidden_layers']} layers).\n"
        f"Cores: {len(os.sched_getaffinity(0))}, threads of torch: {torch.get_num_threads()}; "
        f"torch {torch.__version__}.\n\n"
        f"    python benchmarks/convert.py --gigabytes {options.gigabytes:g} "
        f"--rounds {options.rounds}\n\n{text}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
