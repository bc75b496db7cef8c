"""Placeholder for SGLang's compiled CPU kernels, which no package registry carries.

SGLang's CPU engine imports a few names ending in `_cpu` from here. They raise when called, and
nothing is registered in `torch.ops.sgl_kernel`: SGLang's own probe of that namespace then answers
"no compiled kernels", and its layers compute in plain torch.
"""

__version__ = "0.0.0"


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(
            f"{name}: this sgl_kernel is megatron-opo's placeholder for machines without a GPU; "
            "on a machine with one, uninstall megatron-opo-cpu-placeholders and install "
            "requirements.txt"
        )

    def not_compiled(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no compiled CPU kernel here")

    return not_compiled
