"""What it costs the trainer to ask its servers: client CPU for every 1,000 requests.

    python benchmarks/rollout_client.py [--quick] [--requests 500] [--samples 8] [--tokens 32 256]
                                        [--out table.md]

A real SGLang server on the CPU holds a small Llama of random weights. `Rollout.generate` samples
groups, as in training: prompts out, one request a group; tokens, logprobs and versions back, all of
them checked. The CPU time is that of this process, so it does not depend on how fast the server is;
requests a second are the server's. The first round does not count.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from convert import CONFIG, make_model

from megatron_opo.batch import Prompt
from megatron_opo.recipe import ModelConfig, RolloutConfig, SyncConfig
from megatron_opo.rollout import Rollout, close_servers, launch_servers, wait_healthy

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Round:
    requests: int
    tokens: int
    cpu_seconds: float
    seconds: float


def sample_round(
    rollout: Rollout, version: int, requests: int, samples: int, tokens: int, first: int = 0
) -> Round:
    """Groups of so many samples of up to so many tokens, for prompts that are numbered on from
    `first`."""
    prompts = [
        Prompt(str(i), tuple(4 + (7 * i + j) % 90 for j in range(PROMPT_TOKENS)), "", "", None)
        for i in range(first, first + requests)
    ]
    cpu, start = time.process_time(), time.monotonic()
    groups = rollout.generate(
        prompts,
        samples_per_prompt=samples,
        version=version,
        temperature=1.0,
        max_response_tokens=tokens,
    )
    cpu, seconds = time.process_time() - cpu, time.monotonic() - start
    assert [len(group.samples) for group in groups] == [samples] * requests
    return Round(requests, rollout.stats.response_tokens, cpu, seconds)


def table(found: dict[int, list[Round]], samples: int) -> str:
    """By the most tokens of a response."""
    lines = [
        "| tokens of a response, at most | client CPU s / 1,000 requests | client CPU us / token "
        "| requests/s | tokens/s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for limit, rounds in found.items():
        cpu = statistics.median(1000 * each.cpu_seconds / each.requests for each in rounds)
        each_token = statistics.median(1e6 * each.cpu_seconds / each.tokens for each in rounds)
        speed = statistics.median(each.requests / each.seconds for each in rounds)
        tokens = statistics.median(each.tokens / each.seconds for each in rounds)
        lines.append(f"| {limit} | {cpu:.2f} | {each_token:.2f} | {speed:.1f} | {tokens:,.0f} |")
    return "\n".join([f"{samples} samples a request.", "", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description="Client CPU of sampling from real servers.")
    parser.add_argument("--requests", type=int, default=500, help="in a round")
    parser.add_argument("--samples", type=int, default=8, help="of a request")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="50 requests, 4 samples, 1 round")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.samples, options.rounds, options.tokens = 50, 4, 1, [32]
    options_of_server = {"skip_tokenizer_init": True}  # the model has no tokenizer
    config = RolloutConfig(server_args=options_of_server, start_timeout_s=300)
    with tempfile.TemporaryDirectory(prefix="rollout-client-") as name:
        model = ModelConfig(path=str(make_model(Path(name), CONFIG | SMALL)), dtype="float32")
        servers = launch_servers(config, model, Path(name) / "logs", "cpu")
        try:
            wait_healthy(servers, config.start_timeout_s)
            rollout = Rollout(servers, config, SyncConfig(), model, disk_dir=Path(name), seed=0)
            gc.freeze()  # as the trainer does
            found = {
                limit: [
                    sample_round(rollout, 0, options.requests, options.samples, limit, i * 10**6)
                    for i in range(1 + options.rounds)
                ][1:]
                for limit in options.tokens
            }
        finally:
            close_servers(servers)
    text = (
        f"{options.requests} requests a round, {options.rounds} rounds, one server, on the CPU. "
        f"Cores: {len(os.sched_getaffinity(0))}.\n\n{table(found, options.samples)}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
