"""A Megatron distributed checkpoint (torch_dist) as a Hugging Face model directory.

    python tools/convert_megatron_to_hf.py runs/opo_7b models/opo_7b --verify

The checkpoint may have been saved under any layout, with or without an optimizer. Give one of
  - a run (its newest complete checkpoint is taken), or one of its checkpoints/step_N
  - what convert_hf_to_megatron.py wrote
  - a Megatron-LM directory (latest_checkpointed_iteration.txt), or its iter_* directory: then
    --hf-config must name a directory with config.json and tokenizer of the model

One process on a CPU is enough: no GPU, no torchrun, and memory for a few of the largest tensors.
The directory appears under its name only when it is complete. Exit codes: 0 done (and verified),
1 --verify found a difference, 2 an error (nothing is left behind, or the message says that OUT_DIR
is written but not verified), 3 a bug, with its traceback, 130 interrupted.
"""

import argparse
import os
import signal
from pathlib import Path

MAX_SHARD_GB = 1e6


def main() -> None:
    # Imports take seconds, and libraries hide an interrupt: until they are done, just end.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("target", type=Path, metavar="OUT_DIR", help="must not exist")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="model directory whose config and tokenizer go with the weights (default: as the "
        "checkpoint says)",
    )
    parser.add_argument(
        "--dtype",
        default="as-saved",
        choices=("as-saved", "bfloat16", "float16", "float32"),
        help="of the weights (default: as they are saved)",
    )
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="largest file (default: 5 GB)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor to the bit, and the logits of both models if they fit in memory",
    )
    options = parser.parse_args()
    if not 0 < options.max_shard_gb <= MAX_SHARD_GB:
        parser.error(
            f"--max-shard-gb: {options.max_shard_gb}, must be above 0 and at most {MAX_SHARD_GB:g}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is work for a CPU

    from megatron_opo.convert import DTYPES, exit_with, megatron_to_hf

    exit_with(
        lambda: megatron_to_hf(
            options.checkpoint,
            options.target,
            model=options.hf_config,
            dtype=DTYPES[options.dtype],
            max_shard_bytes=int(options.max_shard_gb * 1e9),
            verify=options.verify,
        )
    )


if __name__ == "__main__":
    main()
