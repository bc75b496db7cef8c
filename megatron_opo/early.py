"""What a run begins before the imports that take seconds: its servers start meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from megatron_opo.observe.loggers import check_loggers
from megatron_opo.observe.prometheus import claim_metrics_port
from megatron_opo.recipe import Recipe
from megatron_opo.rollout import Server, close_servers, launch_servers
from megatron_opo.rollout.episode import find_function
from megatron_opo.rows import check_files
from megatron_opo.runs import ATTEMPT_VARIABLE, only_run


@contextmanager
def started_servers(recipe: Recipe, device: str) -> Iterator[list[Server]]:
    """Hold the run directory and have the servers started, until the end of the block.

    Args:
        device: "cpu" or "cuda", for the servers.

    Raises:
        DataError: a file of the data is not there.
        RecipeError: nor is that of rollout.function.
        CheckpointError: another run holds the directory.
        ServerError: as of `launch_servers`.
        UnfitEnvironmentError: the package of a logger is not installed.
        LogError: the port for Prometheus is taken.
    """
    for split, dataset in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        if dataset is not None:
            check_files(dataset, split)
    find_function(recipe.rollout)
    check_loggers(recipe.log.loggers)
    # In a job of several nodes a launcher holds it.
    held = nullcontext() if ATTEMPT_VARIABLE in os.environ else only_run(recipe.run_path)
    port = recipe.log.prometheus_port
    with held, claim_metrics_port(recipe.log.prometheus_host, port):
        servers = launch_servers(
            recipe.rollout_to_launch, recipe.model, recipe.run_path / "logs", device
        )
        try:
            yield servers
        finally:
            close_servers(servers)
