"""RMSNorm for the layer spec that works without Transformer Engine or Apex."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opo.invariant import rms_norm


class RMSNorm(torch.nn.Module):
    """`invariant.rms_norm`. The weight
    says whether its input is split by sequence parallelism: Megatron then sums its gradient over
    tensor-parallel ranks, which is why torch's own module cannot be used.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight, self.eps)
