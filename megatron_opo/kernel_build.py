"""Compile a source file of this package into a shared library, once per machine and version."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from megatron_opo.errors import KernelError

PACKAGE = Path(__file__).parent
CPP_FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]


def build(source: Path, command: list[str]) -> Path:
    """The library that `command` (a compiler and its flags) makes of `source`.

    It lies in the user's cache under a hash of all that it depends on: source, the package's
    headers, command, the compiler's version and this processor, so that machines that share a home
    directory do not run each other's code.

    Raises:
        KernelError: the compiler does not run or refuses the source; the message has its output.
    """
    headers = [header.read_text() for header in sorted(PACKAGE.glob("*.h"))]
    parts = [
        source.read_text(),
        *headers,
        *command,
        _output([command[0], "--version"]),
        _processor(),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = cache_directory() / f"{source.stem}-{digest}.so"
    if not library.exists():
        # Ranks may build at the same time: each under a name of its own, then renamed at once.
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            unfinished = Path(directory) / library.name
            _output([*command, "-o", str(unfinished), str(source)])
            unfinished.replace(library)
    return library


def load_cpp(source: Path, flags: list[str]) -> ctypes.CDLL:
    """The library that the system's C++ compiler makes of `source` for this processor.

    Raises:
        KernelError: there is no C++ compiler, or it fails.
    """
    command = [*cpp_compiler().split(), *CPP_FLAGS, *flags]
    return ctypes.CDLL(str(build(source, command)))


def cpp_compiler() -> str:
    """$CXX, or what there is on the PATH.

    Raises:
        KernelError: there is none.
    """
    compiler = os.environ.get("CXX") or next(
        (name for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )
    if compiler is None:
        raise KernelError(
            "no C++ compiler: looked for c++, g++ and clang++ on the PATH and for $CXX; install one"
        )
    return compiler


def cuda_compiler() -> str:
    """nvcc, of $CUDA_HOME, the PATH or /usr/local/cuda.

    Raises:
        KernelError: there is none.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for home in (*homes, None, "/usr/local/cuda"):
        path = shutil.which("nvcc" if home is None else f"{home}/bin/nvcc")
        if path is not None:
            return path
    raise KernelError(
        "no nvcc: looked in $CUDA_HOME/bin, on the PATH and in /usr/local/cuda/bin. Install the "
        "CUDA toolkit, or use MEGATRON_OPO_KERNEL=triton"
    )


def cache_home() -> Path:
    """$XDG_CACHE_HOME/megatron_opo or ~/.cache/megatron_opo, whether or not it can be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "megatron_opo"


@cache
def cache_directory() -> Path:
    """`cache_home`; where that cannot be written, a temporary directory of this process."""
    directory = cache_home()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return Path(tempfile.mkdtemp(prefix="megatron_opo-"))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"`{' '.join(command)}` did not run: {error}") from None
    if done.returncode:
        raise KernelError(
            f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stderr.strip()}"
        )
    return done.stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    )
