"""Fixtures that several test modules share, and their order."""

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

# What takes longest, so that with `pytest -n 2 --dist loadfile --no-loadscope-reorder` no worker is
# left with one of these at the end.
LONGEST_FIRST = (
    "test_jobs",
    "test_end_to_end",
    "test_rollout_sync",
    "test_rollout_server",
    "test_rollout_faults",
    "test_training_faults",
    "test_experts",
    "test_layouts",
    "test_sync_families",
    "test_checkpoint_writer",
    "test_cluster",
)


@pytest.hookimpl(tryfirst=True)  # before xdist tells what there is
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: (
            LONGEST_FIRST.index(item.path.stem)
            if item.path.stem in LONGEST_FIRST
            else len(LONGEST_FIRST)
        )
    )


class FailuresAtOnce:
    """A run that is ended before its end has told them nevertheless."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid} failed:\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)  # when the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))
