"""A Hugging Face model as a Megatron distributed checkpoint (torch_dist).

    python tools/convert_hf_to_megatron.py models/Qwen3-8B checkpoints/qwen3_8b --verify

One process on a CPU is enough: no GPU, no torchrun, and memory of some hundred MB for a model of
any size. There are no options for a layout, because what is written has none: Megatron loads it
under any tensor, pipeline, virtual pipeline, expert and data parallelism. The directory appears
under its name only when it is complete.

Train from it with `model.megatron_checkpoint=checkpoints/qwen3_8b`. Exit codes: 0 done (and
verified), 1 --verify found a difference, 2 an error (nothing is left behind, or the message says
that OUT_DIR is written but not verified), 3 a bug, with its traceback, 130 interrupted.
"""

import argparse
import os
import signal
from pathlib import Path

MAX_THREADS = 64


def main() -> None:
    # Imports take seconds, and libraries hide an interrupt: until they are done, just end.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="HF_DIR", help="config.json, *.safetensors")
    parser.add_argument("target", type=Path, metavar="OUT_DIR", help="must not exist")
    parser.add_argument(
        "--dtype",
        default="as-saved",
        choices=("as-saved", "bfloat16", "float16", "float32"),
        help="of the weights (default: as they are saved)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor to the bit, and the logits of both models if they fit in memory",
    )
    parser.add_argument("--threads", type=int, default=2, help="each writes a file (default: 2)")
    options = parser.parse_args()
    if not 1 <= options.threads <= MAX_THREADS:
        parser.error(f"--threads: {options.threads}, must be from 1 to {MAX_THREADS}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is work for a CPU

    from megatron_opo.convert import DTYPES, exit_with, hf_to_megatron

    exit_with(
        lambda: hf_to_megatron(
            options.source,
            options.target,
            dtype=DTYPES[options.dtype],
            threads=options.threads,
            verify=options.verify,
        )
    )


if __name__ == "__main__":
    main()
