"""The GPU kernels without a GPU: Triton in its interpreter, CUDA C++ compiled for the CPU, and the
binaries of both, read for registers, spills and the width of every access."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_opo.advantages import kernel_cuda, kernel_triton
from megatron_opo.kernel_build import cuda_compiler
from tests.gpu_binaries import read_cubin

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (80, 90, 100)
MASK_BYTES = {"unsigned char": 1, "unsigned short": 2, "unsigned int": 4, "unsigned long": 8}
ELEMENT_BYTES = {"Float32": 4, "BFloat16": 2, "Float16": 2}
POINTERS = {"fp32": 4, "bf16": 2, "fp16": 2}


def run_cases(implementation: str, *arguments, **environment) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_cases", *map(str, arguments)],
        env=os.environ | {"MEGATRON_OPO_KERNEL": implementation} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_triton_is_right_in_its_interpreter():
    run_cases("triton", 60, TRITON_INTERPRET="1")


def test_cuda_source_is_right_on_the_cpu(tmp_path):
    library = tmp_path / "kernel.so"
    command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Werror", "-Wall"]
    command += ["-Wno-unknown-pragmas", f"-I{ROOT / 'tests' / 'cuda_on_cpu'}"]
    # A vector that is not aligned is a fault on a GPU: here, too.
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    subprocess.run([*command, "-o", library, kernel_cuda.SOURCE], check=True)
    run_cases("cuda", 80, library)


OFFSETS = """
import torch, mmap
from megatron_opo.advantages import kernel_triton
size, start = 2**31 + 7000, 2**31 - 2000
with mmap.mmap(-1, 2 * size) as memory:
    buffer = torch.frombuffer(memory, dtype=torch.bfloat16)
    rewards, weights = torch.tensor([1.0, 0, 3]).double(), torch.tensor([1.0, 3, 1]).double()
    cu_seqlens = start + torch.tensor([0, 1000, 5000, 5001])
    kernel_triton.ragged_(
        buffer, rewards, weights, torch.tensor([0, 2, 3]), cu_seqlens, None, True, tile=2**20
    )
    assert (buffer[start : start + 1000] == 0.75).all()
    assert (buffer[start + 1000 : start + 5000] == -0.25).all()
    assert buffer[start + 5000 :][:3].tolist() == [3, 0, 0]
    assert buffer[start - 1000 : start].count_nonzero() == 0
    del buffer
"""


def test_triton_takes_offsets_beyond_two_to_the_31():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", OFFSETS], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_binaries_have_no_spills_and_128_bit_accesses(tmp_path, architecture):
    path = tmp_path / "kernel.cubin"
    flags = [flag for flag in kernel_cuda.FLAGS if flag.startswith(("-O", "-std"))]
    command = [cuda_compiler(), *flags, "-cubin", f"-arch=sm_{architecture}"]
    subprocess.run([*command, "-o", path, kernel_cuda.SOURCE], check=True)
    binaries = read_cubin(path)
    kinds = dict.fromkeys(("ragged", "measure", "write"), 0)
    for name, binary in binaries.items():
        assert binary.stack == binary.local == 0, name
        assert not any(access.startswith(("LDL", "STL")) for access in binary.accesses), name
        assert binary.registers <= 64, (name, binary.registers)
        kernel, _, arguments = name.removeprefix("void ").rstrip(">").partition("<")
        if kernel not in kinds:
            continue
        kinds[kernel] += 1
        element, mask = arguments.split(", ")
        # A chunk is 16 tokens a lane: as many vectors as a token of it has bytes.
        vectors, mask_vectors = ELEMENT_BYTES[element], MASK_BYTES.get(mask, int(mask == "true"))
        loads = mask_vectors + (vectors if kernel == "measure" else 0)
        stores = 0 if kernel == "measure" else vectors
        assert binary.accesses["LDG.128"] == loads, (name, binary.accesses)
        # Where the compiler writes a loop out several times, all of it is in vectors.
        assert binary.accesses["STG.128"] >= stores, (name, binary.accesses)
        assert binary.accesses["STG.128"] == 0 or stores, (name, binary.accesses)
    assert kinds == {"ragged": 6, "measure": 12, "write": 12}


def compile_triton(kernel, types, constants, target=None):
    """As the just-in-time compiler does for tensors that begin at multiples of 16 bytes."""
    names = kernel.arg_names
    types = {name: kind for name, kind in types.items() if name in names}
    numbers = ("row_stride", "mask_stride", "width")
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name in numbers]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = target or GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": kernel_triton.WARPS})


def triton_binary(kernel, types, constants, tmp_path, target=None):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compile_triton(kernel, types, constants, target).asm["cubin"])
    (binary,) = read_cubin(path).values()
    assert binary.stack == binary.local == 0
    assert not any(access.startswith(("LDL", "STL")) for access in binary.accesses)
    return binary


def ragged_kernel(element, masked, singleton_raw=False, count="i32"):
    types = dict.fromkeys(["rewards", "weights"], "*fp64")
    types |= dict.fromkeys(["group_offsets", "cu_seqlens"], "*i64")
    types |= dict.fromkeys(["tokens", "sequences", "groups"], count) | {"tiles": "i32"}
    types |= {"buffer": f"*{element}", "mask": "*u8" if masked else f"*{element}"}
    constants = {"HAS_MASK": masked, "SINGLETON_RAW": singleton_raw}
    constants |= {"TILE": kernel_triton.TILE, "WIDTH": kernel_triton.WIDTH}
    return kernel_triton.ragged_kernel, types, constants


def padded_types(element, mask):
    numbers = dict.fromkeys(["row_stride", "mask_stride", "width"], "i32")
    columns = dict.fromkeys(["sums", "lengths", "ends", "advantages"], "*fp64")
    word = "*u8" if mask == 1 else f"*i{8 * mask}"
    return {"tokens": f"*{element}", "mask": word, **numbers, **columns}


# Vectors of a thread in a tile, for tokens of so many bytes.
VECTORS = {n: n * kernel_triton.TILE // (32 * kernel_triton.WARPS) // 16 for n in (1, 2, 4, 8)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["fp32", "bf16"])
@pytest.mark.parametrize(("masked", "count"), [(False, "i32"), (True, "i64")])
def test_triton_ragged_binary(tmp_path, architecture, element, masked, count):
    kernel = ragged_kernel(element, masked, singleton_raw=masked, count=count)
    binary = triton_binary(*kernel, tmp_path, GPUTarget("cuda", architecture, 32))
    size = POINTERS[element]
    assert binary.registers <= 64
    assert binary.accesses["LDG.128"] == (VECTORS[1] if masked else 0), binary.accesses
    assert binary.accesses["STG.128"] >= VECTORS[size], binary.accesses
    # Single tokens only at the two edges of a sequence.
    assert binary.accesses[f"STG.{8 * size}"] == 2, binary.accesses
    assert binary.accesses["LDG.8"] == (2 if masked else 0), binary.accesses


@pytest.mark.parametrize("element", POINTERS)
@pytest.mark.parametrize("mask", [1, 2, 4, 8])
def test_triton_padded_binaries(tmp_path, element, mask):
    types = padded_types(element, mask)
    floats = element == "fp16"  # masks, too: without the sign
    constants = {"KEEP": 2 ** (8 * mask - 1) - 1 if floats else -1, "TILE": kernel_triton.TILE}
    size = POINTERS[element]

    measure = triton_binary(kernel_triton.measure_kernel, types, constants, tmp_path)
    assert measure.registers <= 128
    assert measure.accesses["LDG.128"] == VECTORS[size] + VECTORS[mask], measure.accesses
    assert not {"LDG.8", "LDG.16", "LDG.32", "LDG.64"} & set(measure.accesses)

    write = triton_binary(kernel_triton.write_kernel, types, constants, tmp_path)
    assert write.registers <= 64
    assert write.accesses["LDG.128"] == VECTORS[mask], write.accesses
    assert write.accesses["STG.128"] == VECTORS[size], write.accesses
    assert not {"STG.8", "STG.16", "STG.32", "STG.64"} & set(write.accesses)


@pytest.mark.parametrize("singleton_raw", [False, True])
def test_triton_baseline_binary(tmp_path, singleton_raw):
    types = dict.fromkeys(["sums", "lengths"], "*fp64")
    types |= dict.fromkeys(["order", "group_start", "group_end"], "*i64")
    constants = {"SINGLETON_RAW": singleton_raw, "WIDTH": kernel_triton.WIDTH}
    binary = triton_binary(kernel_triton.baseline_kernel, types, constants, tmp_path)
    assert binary.registers <= 64


@pytest.mark.parametrize(("element", "masked"), [("fp32", False), ("bf16", True)])
def test_triton_compiles_for_amd(element, masked):
    target = GPUTarget("hip", "gfx942", 64)
    constants = {"KEEP": -1, "TILE": kernel_triton.TILE}
    types = padded_types(element, 8)
    for kernel in (
        ragged_kernel(element, masked),
        (kernel_triton.measure_kernel, types, constants),
        (kernel_triton.write_kernel, types, constants),
    ):
        code = compile_triton(*kernel, target).asm["amdgcn"]
        assert re.search(r"vgpr_spill_count: 0\n", code)
        assert re.search(r"private_segment_fixed_size: 0\n", code)
        wide = "load" if kernel[0] is kernel_triton.measure_kernel else "store"
        assert re.search(rf"(global|buffer)_{wide}_dwordx4", code)
