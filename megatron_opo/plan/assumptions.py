"""What a plan takes for granted. Each is printed at the end of the report."""

from dataclasses import dataclass

from megatron_opo.plan.hardware import GIB


@dataclass(frozen=True)
class Assumption:
    value: float
    shown: str
    meaning: str


TRAINER_RESERVE = Assumption(
    2.5 * GIB, "2.5 GiB", "CUDA context, NCCL and library workspaces of a trainer"
)
FRAGMENTATION = Assumption(
    0.05, "5 %", "of activations and workspaces: memory that torch's allocator cannot reuse"
)
RELEASED_SERVER = Assumption(
    3.0 * GIB, "3.0 GiB", "a colocated server that released its memory: context, NCCL, graphs"
)
EXPERT_IMBALANCE = Assumption(
    1.5,
    "1.5",
    "tokens of the busiest expert-parallel rank over the mean, for which the others wait",
)
MATMUL_EFFICIENCY = Assumption(
    0.55, "55 %", "of peak FLOP/s in the update's and prefill's matrix products"
)
BANDWIDTH_EFFICIENCY = Assumption(0.7, "70 %", "of peak memory bandwidth while decoding")
LINK_EFFICIENCY = Assumption(0.7, "70 %", "of a link's bandwidth in collectives")
DECODE_STEP = Assumption(1e-3, "1 ms", "of a decode step that is neither memory nor arithmetic")
ALL_REDUCE = Assumption(15e-6, "15 us", "a small all-reduce, two per layer and decode step")
COLLECTIVE = Assumption(30e-6, "30 us", "to start a message between ranks in the update")
SYNC_TENSOR = Assumption(
    100e-6, "100 us", "for one tensor of a weight sync, on rank 0 and again on a server"
)
SYNC_MESSAGE = Assumption(
    5e-3, "5 ms", "of a weight sync's message that is neither bytes nor tensors"
)
SYNC_CALL = Assumption(0.3e-3, "0.3 ms", "of rank 0 for each server that it sends a message to")
HOST_LINK = Assumption(25e9, "25 GB/s", "between a GPU and its host (PCIe 4 x16 gives 32 at best)")
FILL = Assumption(0.95, "95 %", "of actor.micro_batch_tokens filled with tokens")
PROMPT_SHARE = Assumption(0.5, "1/2", "mean prompt length over data.max_prompt_tokens")

ALL = (
    TRAINER_RESERVE,
    FRAGMENTATION,
    RELEASED_SERVER,
    EXPERT_IMBALANCE,
    MATMUL_EFFICIENCY,
    BANDWIDTH_EFFICIENCY,
    LINK_EFFICIENCY,
    DECODE_STEP,
    ALL_REDUCE,
    COLLECTIVE,
    SYNC_TENSOR,
    SYNC_MESSAGE,
    SYNC_CALL,
    HOST_LINK,
    FILL,
    PROMPT_SHARE,
)
