"""Memory that is used again must never be that of a tensor which still lives."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_opo.weights.memory import HUGE_PAGE_BYTES, KEPT_BYTES, allocate

MB = 2**20


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (1024, 1024), (1000, 7, 999)])
def test_tensors_are_as_torch_makes_them(shape, dtype):
    found, expected = allocate(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (found.shape, found.dtype, found.stride()) == (
        expected.shape,
        dtype,
        expected.stride(),
    )
    assert found.copy_(torch.ones(shape)).sum() == found.numel()


def test_memory_is_used_again_when_the_last_view_has_ended():
    tensor = allocate([3 * MB], torch.uint8)
    address = tensor.data_ptr()
    views = [tensor[5:], tensor.numpy()[:2], tensor.numpy().data[7:]]
    del tensor
    while views:
        others = [allocate([3 * MB], torch.uint8) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        views.pop()
    assert allocate([4 * MB], torch.uint8).data_ptr() == address, "of the same power of two"


def test_no_two_threads_hold_the_same_memory():
    def work(mark: int) -> bool:
        intact = True
        for i in range(60):
            tensor = allocate([HUGE_PAGE_BYTES + (i * mark) % 3 * MB], torch.uint8).fill_(mark)
            low, high = tensor.aminmax()
            intact &= (int(low), int(high)) == (mark, mark)
        return intact

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5)))


def test_little_is_kept():
    gc.collect()
    before = anonymous_bytes()
    tensors = [allocate([32 * MB], torch.uint8).zero_() for _ in range(20)]
    assert anonymous_bytes() - before > 600 * MB
    del tensors
    small = allocate([2 * MB], torch.uint8)
    assert anonymous_bytes() - before <= KEPT_BYTES + small.nbytes + 32 * MB
