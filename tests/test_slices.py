"""Which rows of which tensor each rank holds, and the whole tensors rebuilt from the ranks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.weights.families import Architecture
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.slices import (
    local_kv_groups,
    local_shape,
    merge,
    part_bounds,
    whole_parts,
)

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def architecture(kv_heads: int) -> Architecture:
    return replace(read_architecture(CONFIG), kv_heads=kv_heads)


def cut(model: Architecture, row, parts, rank: int, ranks: int) -> torch.Tensor:
    pieces = []
    for part, (start, end) in zip(parts, part_bounds(model, row, rank, ranks), strict=True):
        dim = row.split or 0
        end = min(end, part.shape[dim])
        pieces.append(part.narrow(dim, min(start, end), max(0, end - start)))
    slice_ = merge(row, pieces, local_kv_groups(model, ranks))
    missing = local_shape(model, row, ranks)[0] - slice_.shape[0]
    return torch.cat([slice_, slice_.new_zeros(missing, *slice_.shape[1:])])


@given(kv_heads=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2, 4, 8]))
def test_the_slices_of_all_ranks_give_every_tensor_back(kv_heads, ranks):
    model = architecture(kv_heads)
    for row in model.rows():
        parts = [torch.randn(model.shape(part)) for part in row.parts]
        slices = [cut(model, row, parts, rank, ranks) for rank in range(ranks)]
        assert {tuple(each.shape) for each in slices} == {local_shape(model, row, ranks)}
        for whole, part in zip(whole_parts(model, row, slices), parts, strict=True):
            assert torch.equal(whole, part), row.megatron
            assert whole.is_contiguous()
            assert whole.untyped_storage().nbytes() == whole.nbytes


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_queries_keys_and_values_lie_group_by_group_cut_evenly(kv_heads, ranks):
    """Written out head by head, as Megatron's attention takes its matrix apart."""
    model = architecture(kv_heads)
    (row,) = (row for row in model.rows() if row.megatron.endswith("linear_qkv.bias"))
    head = torch.arange(4)
    query, key, value = (
        torch.cat([kind + 10 * i + head for i in range(count)])
        for kind, count in ((1000, 8), (2000, kv_heads), (3000, kv_heads))
    )
    order = []
    per_group = 8 // kv_heads
    for group in range(kv_heads):
        order += [1000 + 10 * i + head for i in range(group * per_group, (group + 1) * per_group)]
        order += [2000 + 10 * group + head, 3000 + 10 * group + head]
    slices = [cut(model, row, [query, key, value], rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(slices), torch.cat(order))
    assert len({len(each) for each in slices}) == 1
