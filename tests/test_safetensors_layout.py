"""Files laid out and read by hand, held against the safetensors library."""

import json
import math
import os
import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megatron_opo.errors import WeightError
from megatron_opo.weights.checkpoint import is_finite, open_checkpoint
from megatron_opo.weights.memory import HUGE_PAGE_BYTES
from megatron_opo.weights.safetensors_layout import DTYPES, lay_out, read_layout

DTYPE = st.sampled_from(list(DTYPES.values()))
SHAPE = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "__metadata__"),
    st.tuples(DTYPE, SHAPE),
    max_size=6,
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern, NaN included."""
    return torch.frombuffer(
        bytearray(os.urandom(math.prod(shape) * dtype.itemsize + dtype.itemsize)), dtype=dtype
    )[:-1].reshape(shape)


def bits(tensor: torch.Tensor) -> tuple:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes()


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, entries = lay_out({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            file.seek(entries[name].start)
            file.write(bits(tensor)[2])


@settings(deadline=None)
@given(TENSORS)
def test_the_library_reads_what_is_laid_out(described):
    tensors = {name: random_tensor(*what) for name, what in described.items()}
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        write(path, tensors)
        loaded = load_file(path)
        assert {name: bits(t) for name, t in loaded.items()} == {
            name: bits(t) for name, t in tensors.items()
        }
        layout = read_layout(path)
        assert {name: (e.dtype, e.shape) for name, e in layout.items()} == described
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            filled = [name for name, tensor in tensors.items() if tensor.numel()]
            assert [name for name in file.offset_keys() if name in filled] == filled
        for entry in layout.values():
            assert (entry.end - entry.start) == math.prod(entry.shape) * entry.dtype.itemsize


@settings(deadline=None)
@given(
    DTYPE,
    st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    st.integers(0, 9),
    st.integers(0, 9),
    st.data(),
)
def test_slices_are_the_tensors_own(dtype, shape, start, end, data):
    dim = data.draw(st.none() | st.integers(0, len(shape) - 1))
    tensors = {"before": random_tensor(dtype, (3,)), "it": random_tensor(dtype, shape)}
    with TemporaryDirectory() as directory, ExitStack() as stack:
        save_file(tensors, Path(directory) / "model.safetensors")
        checkpoint = open_checkpoint(Path(directory), stack)
        found = checkpoint.read("it", dim, start, end)
    whole = tensors["it"]
    expected = whole if dim is None else whole[(slice(None),) * dim + (slice(start, end),)]
    assert bits(found) == bits(expected)


def bytes_read() -> int:
    """By this process so far, from whatever."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_of_a_large_tensor_only_the_slice_is_read(tmp_path):
    """Past the size from which memory comes in huge pages."""
    whole = torch.randn(2048, 1000)
    assert whole[:, 300:600].nbytes > HUGE_PAGE_BYTES
    save_file({"it": whole}, tmp_path / "model.safetensors")
    with ExitStack() as stack:
        checkpoint = open_checkpoint(tmp_path, stack)
        found = {}
        for dim, start, end in ((None, 0, 0), (0, 1000, 2048), (1, 300, 600)):
            before = bytes_read()
            part = found[dim, start, end] = checkpoint.read("it", dim, start, end)
            assert bytes_read() - before < part.nbytes + 1000
    assert torch.equal(found[None, 0, 0], whole)
    assert torch.equal(found[0, 1000, 2048], whole[1000:])
    assert torch.equal(found[1, 300, 600], whole[:, 300:600])
    found[0, 1000, 2048].zero_()
    assert torch.equal(found[None, 0, 0], whole), "each has memory of its own"


def _offsets(begin: int, end: int):
    return lambda header: header["b"].update(data_offsets=[begin, end])


# Of two float32 tensors of 4 elements: "a" at 0 to 16, "b" at 16 to 32.
BAD_HEADERS = {
    "overlap": _offsets(8, 24),
    "gap": _offsets(24, 40),
    "same place": _offsets(0, 16),
    "past the end": _offsets(16, 48),
    "reversed": _offsets(32, 16),
    "negative": _offsets(-16, 0),
    "fraction": _offsets(16.0, 32.0),
    "shape too large": lambda header: header["b"].update(shape=[5]),
    "shape too small": lambda header: header["b"].update(shape=[3]),
    "shape that overflows": lambda header: header["b"].update(shape=[2**62, 2**62]),
    "dtype of another size": lambda header: header["b"].update(dtype="F64"),
    "dtype that is none": lambda header: header["b"].update(dtype=["F32"]),
    "no offsets": lambda header: header["b"].pop("data_offsets"),
    "three offsets": lambda header: header["b"].update(data_offsets=[16, 32, 48]),
    "not described": lambda header: header.update(b=None),
    "bytes of no tensor": lambda header: header.pop("b"),
    "metadata of numbers": lambda header: header.update(__metadata__={"format": 1}),
}
BAD_BYTES = {
    "empty": lambda raw: b"",
    "shorter than a length": lambda raw: raw[:7],
    "only a length": lambda raw: raw[:8],
    "truncated header": lambda raw: raw[:40],
    "truncated data": lambda raw: raw[:-1],
    "trailing byte": lambda raw: raw + b"\0",
    "length past the file": lambda raw: (2**40).to_bytes(8, "little") + raw[8:],
    "length past all": lambda raw: b"\xff" * 8 + raw[8:],
    "length 0": lambda raw: bytes(8) + raw[8:],
    "a list": lambda raw: b"\x02" + bytes(7) + b"[]",
    "not JSON": lambda raw: raw[:8] + b"}" + raw[9:],
    "not UTF-8": lambda raw: raw.replace(b'"a"', b'"\xff"'),
    "nested without end": lambda raw: (10**5).to_bytes(8, "little") + b"[" * 10**5,
}


def edited_header(raw: bytes, edit) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


@pytest.mark.parametrize("case", [*BAD_HEADERS, *BAD_BYTES])
def test_a_damaged_file_is_refused_as_the_library_refuses_it(case, tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": torch.ones(4), "b": torch.ones(4)})
    raw = path.read_bytes()
    edit = BAD_HEADERS.get(case)
    path.write_bytes(edited_header(raw, edit) if edit else BAD_BYTES[case](raw))
    with pytest.raises((SafetensorError, OSError)):
        load_file(path)
    with pytest.raises(WeightError, match="is truncated or not a safetensors file") as error:
        read_layout(path)
    assert str(path) in str(error.value)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_what_the_library_refuses_is_refused(data):
    """Any few bytes of the header changed: never accepted when the library does not, and never
    understood in another way."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        write(path, {"a": torch.ones(4), "b": torch.ones(2, 3).bfloat16()})
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(raw) - 28 - 1))
            raw[place] = data.draw(
                st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[],: '))
            )
        path.write_bytes(raw)
        try:
            layout = read_layout(path)
        except WeightError:
            return
        with safe_open(path, framework="pt") as file:
            found = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
            assert found == {name: entry.shape for name, entry in layout.items()}


def test_a_name_that_stands_twice_is_refused(tmp_path):
    """The library takes the last of the two; what was meant is unknown."""
    path = tmp_path / "model.safetensors"
    write(path, {"a": torch.ones(4), "b": torch.ones(4)})
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"a"'))
    with pytest.raises(WeightError, match="a key of the header stands twice"):
        read_layout(path)


def test_a_file_cut_after_it_was_opened_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": torch.ones(4), "b": torch.ones(4)})
    with ExitStack() as stack:
        checkpoint = open_checkpoint(tmp_path, stack)
        os.truncate(path, path.stat().st_size - 4)
        assert torch.equal(checkpoint.read("a", None, 0, 0), torch.ones(4))
        with pytest.raises(WeightError, match=r"model\.safetensors: `b` cannot be read: the file"):
            checkpoint.read("b", None, 0, 0)


@given(DTYPE, st.integers(0, 300), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_is_finite_finds_every_bad_value(dtype, size, bad, data):
    largest = torch.finfo(dtype).max
    tensor = torch.randn(size).clamp(-1, 1).to(dtype) * largest
    assert is_finite(tensor)
    if size:
        tensor[data.draw(st.integers(0, size - 1))] = bad
        assert not is_finite(tensor)
        assert not is_finite(tensor.unflatten(0, (size, 1)).expand(size, 3).t())
