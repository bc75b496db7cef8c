"""The placeholders of the CPU stack: enough for SGLang's imports, and inert beside real builds."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDERS = ROOT / "requirements" / "cpu_placeholders"


def run_python(code: str, *paths: Path) -> str:
    """The output of `code` in a fresh interpreter that sees no GPU."""
    path = os.pathsep.join(map(str, (*paths, PLACEHOLDERS)))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def fake_package(folder: Path, name: str, version: str, code: str) -> None:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = None\nhip = None\n")


def test_kernel_names_import_and_raise_when_called():
    code = """
from sgl_kernel import rotary_embedding_cpu
try:
    rotary_embedding_cpu(1)
except NotImplementedError as error:
    print(error)
"""
    assert "sgl_kernel.rotary_embedding_cpu has no compiled CPU kernel" in run_python(code)


def test_a_gpu_kernel_is_refused_with_the_way_out():
    code = """
try:
    from sgl_kernel import silu_and_mul
except ImportError:
    import sgl_kernel
    try:
        sgl_kernel.silu_and_mul
    except AttributeError as error:
        print(error)
"""
    message = run_python(code)
    assert "silu_and_mul" in message and "uninstall megatron-opo-cpu-placeholders" in message


def test_torchvision_and_a_model_class_import():
    code = """
import opo_cpu_placeholders, torchvision
from transformers import Qwen3ForCausalLM
print(torchvision.__version__)
"""
    assert run_python(code)


def test_other_imports_do_not_load_torch():
    """The hook runs at every start of Python, so it has to be cheap."""
    assert run_python("import opo_cpu_placeholders, json, sys; print('torch' in sys.modules)") == (
        "False"
    )


def test_no_schemas_beside_a_cpu_build_of_torchvision(tmp_path):
    """It brings its own operators; declaring them twice aborts."""
    fake_package(tmp_path, "torchvision", "0.28.0+cpu", "")
    code = "import opo_cpu_placeholders, torchvision, sys; print('torch' in sys.modules)"
    assert run_python(code, tmp_path) == "False"


def test_no_schemas_beside_a_cuda_build_of_torch(tmp_path):
    fake_package(tmp_path, "torchvision", "0.28.0+cu130", "")
    torch = "class version: cuda = '13.0'; hip = None\nclass library: pass  # has no Library"
    fake_package(tmp_path, "torch", "2.13.0+cu130", torch)
    run_python("import opo_cpu_placeholders, torchvision", tmp_path)


def test_schemas_where_both_differ(tmp_path):
    fake_package(tmp_path, "torchvision", "0.28.0+cu130", "")
    torch = """
declared = []
class version: cuda = None; hip = None
class library:
    class Library:
        def __init__(self, *of): declared.append(of)
        def define(self, schema): declared.append(schema.partition("(")[0])
"""
    fake_package(tmp_path, "torch", "2.13.0+cpu", torch)
    code = "import opo_cpu_placeholders, torchvision, torch; print(torch.declared)"
    assert run_python(code, tmp_path) == "[('torchvision', 'FRAGMENT'), 'nms', 'qnms']"


def test_host_buffers_need_no_cuda():
    """SGLang asks CUDA to register them; the plugin allocates plain ones."""
    code = """
import torch
from sglang.srt.mem_cache.pool_host import common
from opo_cpu_placeholders import register_sglang_plugin

def allocate():
    return common.ALLOC_MEMORY_FUNCS["cpu"](
        (4, 8),
        dtype=torch.int32,
        device="cpu",
        pin_memory=True,
        allocator=common.HostTensorAllocator(),
    )

try:
    allocate()
except Exception:
    print("refused")
register_sglang_plugin()
buffer = allocate()
print(tuple(buffer.shape), buffer.fill_(7).sum().item())
"""
    assert run_python(code).splitlines() == ["refused", "(4, 8) 224"]


def test_sglang_finds_the_plugin():
    (entry,) = entry_points(group="sglang.srt.plugins", name="megatron_opo_cpu")
    assert entry.value == "opo_cpu_placeholders:register_sglang_plugin"
