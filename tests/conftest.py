"""Fixtures that several test modules share, and which tests share a worker."""

from pathlib import Path

import pytest
from hypothesis import settings
from servers import (
    both_launched,
    launched_llama_pool,
    launched_qwen_pool,
    llama_pool,
    qwen_pool,
)

__all__ = [
    "both_launched",
    "launched_llama_pool",
    "launched_qwen_pool",
    "llama_pool",
    "qwen_pool",
]

# What an example takes says how busy the machine is.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

SLURM, SERVERS = "slurm", "servers"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n 2 --dist loadgroup --no-loadscope-reorder`: tests that share what is slow to
    start run on one worker, and what takes longest begins first."""

    def group_of(item: pytest.Item) -> str:
        if item.path.parent.name == "slurm":
            return SLURM
        fixtures = getattr(item, "fixturenames", ())
        return SERVERS if "launched_qwen_pool" in fixtures else Path(item.path).stem

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    first = (SLURM, SERVERS)
    items.sort(key=lambda item: first.index(g) if (g := group_of(item)) in first else len(first))
