"""GPUs, their driver, and what compiles for them."""

import os
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from megatron_opo.doctor.findings import Finding, ask, judged
from megatron_opo.environment import Facts
from megatron_opo.errors import KernelError
from megatron_opo.kernel_build import CPP_FLAGS, cpp_compiler, cuda_compiler

QUERY = ("index", "name", "driver_version", "memory.total", "memory.used")
BUSY_MIB = 1024
SOURCE = '#include <cmath>\nextern "C" double root(double x) { return std::sqrt(x); }\n'


def check_driver() -> list[Finding]:
    """What nvidia-smi says: driver, GPUs, and whether somebody else uses them."""
    if shutil.which("nvidia-smi") is None:
        if Path("/dev/nvidiactl").exists():
            return [
                Finding(
                    "driver",
                    "/dev/nvidiactl is there, but no nvidia-smi",
                    "problem",
                    "install the driver's tools, or start the container with them (docker "
                    "--gpus all, apptainer --nv): GPUs are found by it",
                )
            ]
        return [Finding("driver", "no NVIDIA driver here; everything runs on the CPU")]
    answer = ask("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in answer.output.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY)]
    if answer.code != 0 or not rows:
        return [
            Finding(
                "driver",
                f"nvidia-smi: {answer.last_line}",
                "problem",
                "after an update of the driver, reboot; in a container, start it with the GPUs "
                "(docker --gpus all, apptainer --nv, pyxis)",
            )
        ]
    cuda = driver_cuda(ask("nvidia-smi").output)
    driver = f"{rows[0][2]}, for CUDA up to {cuda}" if cuda else rows[0][2]
    return [Finding("driver", driver), _gpus(rows)]


def driver_cuda(screen: str) -> str | None:
    """The newest CUDA that the driver can, from the screen of nvidia-smi."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", screen)
    return found.group(1) if found else None


def _gpus(rows: list[list[str]]) -> Finding:
    kinds = [f"{row[1]}, {float(row[3]) / 1024:.0f} GiB" for row in rows if row[3].isdigit()]
    shown = "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        shown += "; hidden by CUDA_VISIBLE_DEVICES, so everything runs on the CPU"
        return Finding("GPUs", shown)
    busy = [row[0] for row in rows if row[4].isdigit() and int(row[4]) > BUSY_MIB]
    return judged(
        "GPUs",
        shown + (f"; memory in use on {', '.join(busy)}" if busy else ""),
        "note" if busy else "ok",
        "another program holds memory there; `nvidia-smi` lists it. Wait, end it, or choose others "
        "with CUDA_VISIBLE_DEVICES",
    )


def check_cuda(facts: Facts, imports: dict[str, dict[str, Any]]) -> list[Finding]:
    """Do torch and the GPUs work together? Nothing to say without a GPU or with a CPU build."""
    built = imports.get("torch", {}).get("cuda")
    if facts.gpu is None or built is None:
        return [Finding("CUDA", "not used")] if facts.gpu is None else []
    cuda = driver_cuda(ask("nvidia-smi").output)
    if cuda and int(cuda.split(".")[0]) < int(built.split(".")[0]):
        return [
            Finding(
                "CUDA",
                f"torch is built for {built}, the driver for {cuda} at most",
                "problem",
                "have the driver updated, or install a build of torch for that CUDA",
            )
        ]
    result = imports.get("gpus", {})
    sick = result.get("sick", []) + ([result["error"]] if "error" in result else [])
    if not sick and not result.get("gpus"):
        sick = [f"torch (CUDA {built}) sees no GPU, nvidia-smi does"]
    if sick:
        return [
            Finding(
                "CUDA",
                "; ".join(sick),
                "problem",
                "try `python -c 'import torch; torch.ones(1).cuda()'`, which says more; leave a "
                "broken GPU out with CUDA_VISIBLE_DEVICES, or have the node reset",
            )
        ]
    return [Finding("CUDA", f"{built}; a product on each of {len(result['gpus'])} GPUs was right")]


def check_compilers(facts: Facts) -> list[Finding]:
    findings = [_cpp_compiler(), _nvcc(facts)]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if facts.gpu and not header.is_file():
        findings.append(
            Finding(
                "Python's headers",
                f"no {header}",
                "problem",
                "triton compiles against it: install python3-dev, or take another Python",
            )
        )
    return findings


def _cpp_compiler() -> Finding:
    """Compiles a few lines: one without its library's headers is of no use."""
    name, without = "C++ compiler", "without, CPU kernels fall back to torch, which is slower"
    try:
        compiler = cpp_compiler()
    except KernelError as error:
        return Finding(name, str(error).partition(";")[0], "note", f"{without}: install g++")
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "root.cpp"
        source.write_text(SOURCE)
        library = str(source.with_suffix(".so"))
        tried = ask(*compiler.split(), *CPP_FLAGS, "-fopenmp", "-o", library, str(source))
    if tried.code != 0:
        return Finding(
            name,
            f"{compiler} compiles nothing: {tried.last_line}",
            "note",
            f"{without}: install g++ whole, with its headers and OpenMP, or name another in CXX",
        )
    version = ask(*compiler.split(), "--version").output.splitlines()
    return Finding(name, version[0] if version else compiler)


def _nvcc(facts: Facts) -> Finding:
    try:
        compiler = cuda_compiler()
    except KernelError:
        found = "not found; only the CUDA kernel and building Transformer Engine need it"
        return Finding("nvcc", found)
    release = re.search(r"release ([\d.]+)", ask(compiler, "--version").output)
    found = f"{release.group(1) if release else 'of unknown version'}, {compiler}"
    built = facts.torch_cuda or ""
    unlike = bool(
        release and built[:1].isdigit() and release.group(1).split(".")[0] != built.split(".")[0]
    )
    return judged(
        "nvcc",
        found,
        "note" if unlike and facts.gpu else "ok",
        f"torch is built for CUDA {built}: what is compiled beside it should be, too; name that "
        "toolkit in CUDA_HOME",
    )
