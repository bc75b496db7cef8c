"""Two hooks that let SGLang and transformers run beside a CPU build of torch.

Python imports this module at every start of the environment's interpreter (through the .pth file
of the same name), child processes included, so it must stay cheap: standard library only, and
torch is imported only once somebody asks for torchvision. README.md beside it says why.
"""

import importlib.abc
import importlib.machinery
import re
import sys
from pathlib import Path

TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _is_cuda_build(torchvision_origin: str) -> bool:
    version_file = Path(torchvision_origin).with_name("version.py")
    version = re.search(r"__version__ = '([^']*)'", version_file.read_text())
    return version is not None and "+cu" in version.group(1)


class TorchvisionSchemas(importlib.abc.MetaPathFinder):
    """Declares torchvision's missing operators just before torchvision is imported."""

    asked = False
    library = None  # torch forgets the schemas when this object dies

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision" or self.asked:
            return None
        self.asked = True
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not _is_cuda_build(spec.origin):
            return None
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in TORCHVISION_SCHEMAS:
                self.library.define(schema)
        return None


def register_sglang_plugin() -> None:
    """SGLang's plugin hook: host buffers are not pinned where there is no CUDA to pin them for."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    def allocate_unpinned(dims, dtype, device, pin_memory, allocator, **_):
        return allocator.allocate(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_unpinned


sys.meta_path.insert(0, TorchvisionSchemas())
