"""The first operation in which a server and the trainer compute different numbers.

    python tools/logprob_bisect.py --recipe recipes/quickstart_cpu.yaml
    python tools/logprob_bisect.py --model models/Qwen3-8B --dtype bfloat16 --response-tokens 32

Starts one SGLang server with the recipe's settings, has it sample responses, and gives the model of
the trainer the same tokens. Both record what each operation of each layer gives: a table shows from
the embedding to the logprob how many values are equal to the bit, and how far the others are apart,
for tokens that the server computed in a prefill and in a decode. Below it stands the first
operation that differs, with its likely causes.

One server of one rank, one trainer rank, one after the other, so that a GPU holds one model at a
time; layouts of the recipe are set to 1. Not supported: tensor parallelism, quantised models, and
models that SGLang runs by its transformers backend. Exit codes: 0 all equal, 1 something differs,
2 an error, 3 a bug, with its traceback, 130 interrupted.
"""

import argparse
import os
import signal


def main() -> None:
    # Imports take seconds, and libraries hide an interrupt: until they are done, just end.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from megatron_opo.bisect.command import add_options, run

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_intermixed_args()

    from megatron_opo.convert import exit_with

    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
