"""What the GPU's assembler made of a kernel: registers, local memory, widths of accesses."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia

TOOLS = Path(triton.backends.nvidia.__path__[0]) / "bin"


@dataclass(frozen=True)
class Binary:
    """Of one kernel. `accesses` counts instructions such as LDG.128 (a load of 128 bits from
    global memory), STG.32, LDL.32 (from local memory: a spill)."""

    registers: int
    stack: int
    local: int
    accesses: Counter


def read_cubin(path: Path) -> dict[str, Binary]:
    """By the kernel's name: as in the source, with its template arguments."""
    usage = _run("cuobjdump", "-res-usage", path)
    listing = _run("nvdisasm", path)
    resources = {
        name: [int(number) for number in numbers]
        for name, *numbers in re.findall(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage
        )
    }
    _, *parts = re.split(r"\n\.text\.(\S+):\n", listing)
    binaries = {}
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        accesses = Counter(map(_access, re.findall(r"\b((?:LD|ST)[GL]\b[.\w]*)", code)))
        binaries[_readable(name)] = Binary(*resources[name], accesses)
    return binaries


def _access(instruction: str) -> str:
    """LDG.E.128 -> LDG.128, STG.E -> STG.32, LDG.E.U8.CONSTANT -> LDG.8."""
    kind, *modifiers = instruction.split(".")
    widths = [m.strip("US") for m in modifiers if m.strip("US").isdigit()]
    return f"{kind}.{widths[0] if widths else 32}"


def _readable(name: str) -> str:
    demangled = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True)
    return demangled.stdout.strip().replace("(anonymous namespace)::", "").split("(")[0][-60:]


def _run(tool: str, *arguments) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
