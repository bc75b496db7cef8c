"""Boxes of tensors out of what torch.save wrote, held against torch.load."""

import re
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.weights.chunk_file import read_chunk
from megatron_opo.weights.safetensors_layout import DTYPES


def save(path: Path, *tensors: torch.Tensor) -> list[tuple[int, int]]:
    """One after the other, as a distributed checkpoint has them; their places."""
    places = []
    with open(path, "wb") as file:
        for tensor in tensors:
            start = file.tell()
            torch.save(tensor, file)
            places.append((start, file.tell() - start))
    return places


@settings(deadline=None)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.data(),
)
def test_any_box_is_read_into_any_place(dtype, shape, data):
    tensor = torch.randn(shape).to(dtype)
    first = [data.draw(st.integers(0, size - 1)) for size in shape]
    last = [data.draw(st.integers(a + 1, n)) for a, n in zip(first, shape, strict=True)]
    box = tuple(slice(a, b) for a, b in zip(first, last, strict=True))
    # Into a larger tensor, where the box's rows do not always follow each other.
    around = torch.zeros([n + 1 for n in shape], dtype=dtype)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        _, place, _ = save(path, torch.ones(3), tensor, torch.ones(3))
        read_chunk(path, place, first, around[box])
    assert torch.equal(around[box], tensor[box])
    assert around.count_nonzero() == tensor[box].count_nonzero()


def test_a_tensor_within_a_larger_storage_is_found(tmp_path):
    (place,) = save(tmp_path / "file", torch.arange(100.0)[40:60])
    target = torch.empty(5)
    read_chunk(tmp_path / "file", place, [3], target)
    assert target.tolist() == [43, 44, 45, 46, 47]


def test_only_the_box_is_read(tmp_path):
    tensor = torch.randn(1000, 1000)
    (place,) = save(tmp_path / "file", tensor)
    target = torch.empty(10, 1000)
    read_chunk(tmp_path / "file", place, [0, 0], target)
    before = bytes_read()
    read_chunk(tmp_path / "file", place, [500, 0], target)
    assert bytes_read() - before < target.nbytes + 40_000
    assert torch.equal(target, tensor[500:510])


def bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


BAD = {
    "other dtype": (torch.ones(4, 4).half(), r"holds torch\.float16 \[4, 4\]"),
    "too small": (torch.ones(4, 3), r"holds torch\.float32 \[4, 3\]"),
    "other rank": (torch.ones(16), r"holds torch\.float32 \[16\]"),
    "transposed": (torch.ones(4, 4).t(), "not hold a contiguous tensor"),
    "no tensor": ({"a": 1}, "not hold a contiguous tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_another_tensor_than_the_expected_is_refused(case, tmp_path):
    value, message = BAD[case]
    (place,) = save(tmp_path / "file", value)
    with pytest.raises(ValueError, match=message):
        read_chunk(tmp_path / "file", place, [0, 0], torch.empty(4, 4))


def test_a_cut_file_is_an_error(tmp_path):
    (place,) = save(tmp_path / "file", torch.ones(400))
    raw = (tmp_path / "file").read_bytes()
    for size in (0, 10, 500, len(raw) // 2, len(raw) - 1):
        (tmp_path / "file").write_bytes(raw[:size])
        with pytest.raises((EOFError, OSError, RuntimeError, ValueError, UnpicklingError)):
            read_chunk(tmp_path / "file", place, [0], torch.empty(400))
