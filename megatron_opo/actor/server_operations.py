"""The operations of SGLang's servers on a CPU, for a trainer on one: then both find the same
logprob for a token, to the bit.

What adds up numbers in an order of its own is a matrix product, attention, and the softmax over the
vocabulary. The servers' products and attention are this package's (`sglang_plugin`): here they
take the place of torch's and of scaled_dot_product_attention. Norms, rotations and activations are
the same operations of torch on both sides.
"""

from functools import cache, lru_cache

import torch

from megatron_opo import attention_kernel, invariant
from megatron_opo.actor.attention import PackedAttention, packed_attention
from megatron_opo.actor.packing import Bounds


def use_server_operations(model: torch.nn.Module) -> None:
    """From now on all matrix products of this process are the servers', and so is the attention of
    `model`."""
    _use_invariant_products()
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.attend = attend


@cache
def _use_invariant_products() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::mm", invariant.matmul, "CPU")
    return library


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Bounds,
    keys: Bounds,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """`attention.packed_attention`, on the CPU."""
    return _Attend.apply(query, key, value, queries, keys, scale, window)


class _Attend(torch.autograd.Function):
    """The kernel has no gradient: `packed_attention`, computed again, has the same but for the last
    digits."""

    @staticmethod
    def forward(ctx, query, key, value, queries, keys, scale, window):
        ctx.save_for_backward(query, key, value)
        ctx.settings = queries, keys, scale, window
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        places = _places(*(tuple(each.cu_seqlens.diff().tolist()) for each in (queries, keys)))
        attention_kernel.best()(
            query,
            out,
            key.contiguous(),
            value.contiguous(),
            *places,
            query.shape[-1] ** -0.5 if scale is None else scale,
            None if window is None else window - 1,
        )
        return out

    @staticmethod
    def backward(ctx, gradient):
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = packed_attention(*inputs, *ctx.settings)
        return *torch.autograd.grad(out, inputs, gradient), None, None, None, None


@lru_cache(maxsize=16)
def _places(
    queries: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the kernel: the row of each place of each sequence, and the sequence and place of each
    query, which are the last ones of their sequence."""
    lengths, counts = torch.tensor(keys), torch.tensor(queries)
    first = (lengths.cumsum(0) - lengths).to(torch.int32)
    table = first[:, None] + torch.arange(int(lengths.max()), dtype=torch.int32)
    sequences = torch.arange(len(queries)).repeat_interleave(counts)
    behind = lengths - counts.cumsum(0)  # keys before a sequence's first query, less rows before
    return table, sequences, torch.arange(len(sequences)) + behind[sequences]
