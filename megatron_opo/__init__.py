"""Exact on-policy RL with the optimal reward baseline, on Megatron-Core and SGLang."""

import os
import time

__version__ = "0.1.0"

# When the command was given, nearly, by the clock that all processes of a machine share (that of
# spans). A launcher passes its own on to its ranks.
BEGAN_VARIABLE = "MEGATRON_OPO_BEGAN"
BEGAN = float(os.environ.get(BEGAN_VARIABLE, time.monotonic()))
