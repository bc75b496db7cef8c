"""The training loop: prompt -> rollout -> reward -> advantage -> update -> sync, and again.

`train` runs on every rank. Rank 0 also drives: `desk` holds what only one process may own (prompt
cursor, servers, reward workers, log); `driver.run` is how a stage of rank 0 stands in the common
program. On the other ranks `desk`, and whatever a stage returns, is None, whatever its type says.
"""

import gc
import math
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_opo import BEGAN
from megatron_opo.actor.checkpoint import find_whole_checkpoint, load_checkpoint
from megatron_opo.actor.checkpoint_writer import CheckpointWriter
from megatron_opo.actor.parallel import Parallel
from megatron_opo.actor.replicas import check_replicas
from megatron_opo.actor.shift import PolicyShift
from megatron_opo.actor.step import Actor
from megatron_opo.batch import PackedBatch
from megatron_opo.checkpoint_source import find_checkpoint
from megatron_opo.collect import collect, log_step
from megatron_opo.desk import Desk, open_desk, phase
from megatron_opo.errors import CheckpointError, OnPolicyError, OpoError
from megatron_opo.model_fit import check_model
from megatron_opo.observe.console import Console
from megatron_opo.observe.report import REPORT, write_report
from megatron_opo.observe.text import duration, number
from megatron_opo.on_policy import check_agreement
from megatron_opo.profiling import Profiler
from megatron_opo.recipe import Recipe
from megatron_opo.rollout import Server, SharedBucket, SyncStats, parts_of, share_over_nodes
from megatron_opo.runs import EXPORTS, Checkpoint, exports
from megatron_opo.spmd import Driver, DriverFailed
from megatron_opo.update import explain_gap, take_step
from megatron_opo.weights.export import export_hf
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.load import load_hf, load_megatron
from megatron_opo.weights.save import save_hf

T = TypeVar("T")
OnServers = Callable[[Callable[[], Any]], Any]


def train(
    recipe: Recipe, parallel: Parallel, servers: list[Server], console: Console | None = None
) -> int:
    """Run the recipe from its newest checkpoint, or from the model directory, to its last step.

    The signal that asked it to stop before that (`stop`), after a checkpoint, or 0. `servers` are
    rank 0's, which are starting, and so is `console`, which has spoken to the user already.
    """
    driver = Driver(parallel.rank, parallel.control)
    driver.spans.add_earlier("imports", BEGAN)
    hf_config = check_model(recipe)
    profiler = Profiler(recipe, parallel.device, driver)
    found = find_whole_checkpoint(recipe.run_path, parallel)
    device = parallel.device.type
    shared = open_shared_bucket(recipe, hf_config, parallel)
    with driver.spans.of("data"):
        desk = driver.run(
            lambda: open_desk(
                recipe, hf_config, device, found, shared, servers, driver.spans, console
            )
        )
    checkpoints = CheckpointWriter(recipe, driver, parallel, found.version)
    with desk or nullcontext(), checkpoints, profiler:
        actor, shift = start(recipe, hf_config, parallel, driver, desk, found.checkpoint, shared)

        def on_servers(work: Callable[[], T]) -> T:
            return use_servers(work, actor, desk, driver, shared, checkpoints)

        check_probe(actor, desk, driver, on_servers)
        driver.run(lambda: desk.stop.keep_from_now_on())
        if recipe.eval.at_start and actor.version == 0:
            on_servers(lambda: evaluate(desk, version=0))
        if found.checkpoint and found.checkpoint.owes_eval:
            on_servers(lambda: evaluate(desk, version=actor.version))

        gc.freeze()  # what was imported and built stays: no use in looking through it again
        profiler.turn_to(actor.version + 1, desk)
        while (step := actor.version) < recipe.train.steps:
            batch = on_servers(lambda: collect(desk, version=step))
            metrics = checkpoints.poll()
            if signum := stop_signal(desk, driver):
                driver.run(lambda: desk.return_prompts())
                checkpoint_and_note(actor, desk, driver, checkpoints)
                return signum
            hand_over_to_trainer(actor, desk, driver)
            metrics |= take_step_or_end(batch, actor, desk, driver, checkpoints, shift)
            if is_due(recipe.train.check_ranks_every, actor.version):
                with phase(desk, driver, "check_ranks"):
                    check_replicas(actor)
            hand_over_to_servers(actor, desk, driver)
            metrics |= sync(actor, desk, driver, shared)
            if actor.version == step:
                continue  # the batch was skipped
            driver.run(
                lambda: log_step(desk, batch, metrics, step, actor.token_values(batch))  # noqa: B023
            )
            profiler.turn_to(actor.version + 1, desk)
            done = actor.version == recipe.train.steps
            if is_due(recipe.eval.every, actor.version) or (done and recipe.eval.at_end):
                on_servers(lambda: evaluate(desk, version=actor.version))
            if is_due(recipe.checkpoint.every, actor.version) or done:
                with phase(desk, driver, "checkpoint"):
                    checkpoints.start(actor, lambda: desk.state())
            at_end = done and recipe.checkpoint.export_hf
            if is_due(recipe.checkpoint.export_hf_every, actor.version) and not at_end:
                export(actor, desk, driver, required=False)

        if signum := stop_signal(desk, driver):
            checkpoint_and_note(actor, desk, driver, checkpoints)
            return signum
        finish_checkpoint(desk, driver, checkpoints)
        with phase(desk, driver, "report"):
            driver.run(lambda: write_report(recipe.run_path))
        if recipe.checkpoint.export_hf:
            export(actor, desk, driver, required=True)
        driver.run(lambda: say_finished(desk))
    return 0


def start(
    recipe: Recipe,
    hf_config: dict,
    parallel: Parallel,
    driver: Driver,
    desk: Desk,
    checkpoint: Checkpoint | None,
    shared: SharedBucket | None,
) -> tuple[Actor, PolicyShift | None]:
    """An actor and servers that hold the same weights, and neither more memory than it may; with
    log.policy_shift what measures how far the actor goes from here."""
    hands_over = recipe.rollout.hands_over(parallel.device.type)
    if hands_over:
        # Servers take a share of the memory that they find free: they come first, and go.
        driver.run(lambda: desk.wait_until_ready())
        driver.run(lambda: desk.release_servers())
    with phase(desk, driver, "model"):
        actor = Actor(recipe, hf_config, parallel, driver)
        load_start(actor)
        actor.weights_loaded()
        if desk:
            actor.on_micro_batch = lambda done, total: desk.log.advance(
                done, total, "micro-batches"
            )
        shift = PolicyShift(actor) if recipe.log.policy_shift else None
        if checkpoint:
            load_checkpoint(actor, checkpoint)
        if recipe.train.check_ranks_every:
            check_replicas(actor)
    if hands_over:
        hand_over_to_servers(actor, desk, driver)
    else:
        driver.run(lambda: desk.wait_until_ready())
    if hands_over or actor.version > 0 or has_other_start(recipe):
        sync(actor, desk, driver, shared)
    return actor, shift


def say_finished(desk: Desk) -> None:
    recipe, report = desk.recipe, desk.recipe.run_path / REPORT
    version, best = recipe.train.steps, desk.best_eval
    steps = "1 step" if version == 1 else f"{version:,} steps"
    said = [f"finished: {steps} in {duration(desk.log.elapsed())}"]
    if best is not None:
        name = best.metric.removeprefix("eval/")
        said.append(f"best {name} {number(best.value)} at step {best.step}")
    facts: dict[str, Any] = {"step": version, "report": str(report)}
    if recipe.checkpoint.export_hf:
        facts["model"] = str(recipe.run_path / EXPORTS / f"step_{version}")
        desk.log.note(f"model: {facts['model']}")
    said.append(f"report: {report}")
    desk.log.last("; ".join(said), **facts)


def stop_signal(desk: Desk, driver: Driver) -> int:
    """What has asked for a stop, or 0; the same on all ranks."""
    asked = [torch.tensor(desk.stop.signum or 0)] if driver.is_here else None
    return int(driver.share(asked)[0])


def use_servers(
    work: Callable[[], T],
    actor: Actor,
    desk: Desk,
    driver: Driver,
    shared: SharedBucket | None,
    checkpoints: CheckpointWriter,
) -> T:
    """The result of rank 0's `work`, which asks the servers. When all of these are lost it begins
    again, as soon as one has come back and been given the weights.

    An error in it ends the run, after a checkpoint: the weights are whole meanwhile.

    Raises:
        ServerError: no server comes back.
    """
    try:
        for repeats in range(max(1, actor.recipe.rollout.max_restarts), -1, -1):
            result = driver.run(lambda: desk.unless_servers_lost(work, repeats > 0))  # noqa: B023
            if not driver.agree(bool(desk and desk.servers_lost)):
                break
            driver.run(lambda: desk.wait_for_a_server())
            if stop_signal(desk, driver):
                break
            sync(actor, desk, driver, shared)
        return result  # pyright: ignore[reportReturnType, reportPossiblyUnboundVariable]
    except OpoError as error:
        if driver.is_here or isinstance(error, DriverFailed):  # so that all ranks are here
            checkpoint_before_end(actor, desk, driver, checkpoints)
        raise


def checkpoint_and_note(
    actor: Actor, desk: Desk, driver: Driver, checkpoints: CheckpointWriter
) -> None:
    checkpoint_if_newer(actor, desk, driver, checkpoints)
    driver.run(
        lambda: desk.log.last(
            f"stopped after step {actor.version}, as asked "
            f"({signal.Signals(desk.stop.signum or 0).name}); the same command goes on from there",
            step=actor.version,
        )
    )


def checkpoint_if_newer(
    actor: Actor, desk: Desk, driver: Driver, checkpoints: CheckpointWriter
) -> None:
    """Than those before; complete when this returns."""
    if actor.version > checkpoints.version:
        with phase(desk, driver, "checkpoint"):
            checkpoints.start(actor, lambda: desk.state())
    finish_checkpoint(desk, driver, checkpoints)


def checkpoint_before_end(
    actor: Actor, desk: Desk, driver: Driver, checkpoints: CheckpointWriter
) -> None:
    """If that fails, too, what failed first is what the user must see."""
    try:
        checkpoint_if_newer(actor, desk, driver, checkpoints)
    except OpoError as error:
        said = f"no checkpoint of step {actor.version}: {error}"
        with suppress(OpoError):
            driver.run(lambda: desk.log.warn(said))


def take_step_or_end(
    batch: PackedBatch,
    actor: Actor,
    desk: Desk,
    driver: Driver,
    checkpoints: CheckpointWriter,
    shift: PolicyShift | None,
) -> dict[str, float]:
    """As `take_step`. Before an error of all ranks ends the run, what sampled the batch is saved if
    it is whole: the run can go on from there, and the batch be replayed."""
    try:
        return take_step(batch, actor, desk, driver, shift)
    except OpoError:
        if actor.has_finite_weights():
            driver.run(lambda: desk.return_prompts())
            checkpoint_before_end(actor, desk, driver, checkpoints)
        raise


def finish_checkpoint(desk: Desk, driver: Driver, checkpoints: CheckpointWriter) -> None:
    """Wait until what was begun is complete."""
    with phase(desk, driver, "checkpoint"):
        metrics = checkpoints.wait()
    if metrics:
        desk.log.note(
            f"checkpoint of step {checkpoints.version}: {metrics['checkpoint/bytes'] / 1e6:,.0f} "
            f"MB written in {duration(metrics['checkpoint/write_seconds'])}"
        )


def load_start(actor: Actor) -> None:
    """The weights that training starts from; what servers read is always those of `model.path`."""
    model = actor.recipe.model
    if model.megatron_checkpoint is None:
        load_hf(actor.modules, Path(model.path), actor.hf_config)
    else:
        found = find_checkpoint(Path(model.megatron_checkpoint))
        load_megatron(actor.modules, found.checkpoint, actor.hf_config)


def open_shared_bucket(recipe: Recipe, hf_config: dict, parallel: Parallel) -> SharedBucket | None:
    """What weights are sent by, where that is shared memory."""
    if recipe.transport(parallel.device.type) != "shared_memory":
        return None
    shapes = read_architecture(hf_config).hf_shapes().values()
    width = getattr(torch, recipe.model.dtype).itemsize
    sizes = [math.prod(shape) * width for shape in shapes]
    parts = parts_of(recipe.sync.bucket_mb * 2**20, sizes)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world_size))
    return share_over_nodes(parts, parallel.device, ranks_per_node, parallel.control)


def has_other_start(recipe: Recipe) -> bool:
    """Whether the actor starts from other weights than the servers."""
    return bool(recipe.rollout.urls or recipe.model.megatron_checkpoint)


def hand_over_to_trainer(actor: Actor, desk: Desk, driver: Driver) -> None:
    """With rollout.hand_over_memory: the servers give their memory back, the actor takes its."""
    if actor.memory.is_away:
        with phase(desk, driver, "hand_over"):
            driver.run(lambda: desk.release_servers())
            actor.memory.take_back()


def hand_over_to_servers(actor: Actor, desk: Desk, driver: Driver) -> None:
    """With rollout.hand_over_memory: the actor gives its memory back, which the servers take as
    they get new weights (`sync`)."""
    if actor.recipe.rollout.hands_over(actor.parallel.device.type):
        with phase(desk, driver, "hand_over"):
            actor.memory.give_away()
            dist.barrier(group=actor.parallel.control)


def sync(actor: Actor, desk: Desk, driver: Driver, shared: SharedBucket | None) -> dict[str, float]:
    """Give the servers the actor's weights as its version; again without those that are lost
    meanwhile. None may be left, then `use_servers` waits for one."""
    for tries in count(1):
        stats = send_weights(actor, desk, driver, shared)
        rollout = desk and desk.rollout
        again = rollout and stats is None and rollout.serving and tries <= len(rollout.servers)
        if not driver.agree(bool(again)):
            break
    return {} if stats is None else {"sync/seconds": stats.seconds, "sync/bytes": stats.bytes}


def send_weights(
    actor: Actor, desk: Desk, driver: Driver, shared: SharedBucket | None
) -> SyncStats | None:
    """None when servers were lost meanwhile."""
    weights = export_hf(actor.modules, actor.hf_config, actor.dtype, shapes_elsewhere=True)

    def send() -> SyncStats | None:
        try:
            return desk.sync(weights, actor.version)
        finally:
            if shared is not None:
                shared.stop()
            deque(weights, maxlen=0)  # the other ranks give their parts to the end

    def take_part() -> None:
        with driver.spans.of("sync"):
            if shared is not None:
                shared.follow(weights)
            deque(weights, maxlen=0)

    return driver.run(send, meanwhile=take_part)


def evaluate(desk: Desk, version: int) -> None:
    """Sample the held-out prompts; avg@k and pass@k."""
    if desk.eval_prompts is None:
        return
    desk.owes_eval = True
    with desk.log.phase("eval"):
        groups = desk.stop.unless_asked(lambda: desk.sample_and_score_eval(version))
    if groups is None:
        return
    with desk.log.phase("log"):
        desk.log.samples(version, groups, None, kind="eval")
        desk.log_eval(version, groups)
    desk.owes_eval = False


def check_probe(actor: Actor, desk: Desk, driver: Driver, on_servers: OnServers) -> None:
    """Before anything is trained: do servers and actor give a text the same logprobs?"""
    with phase(desk, driver, "probe"):
        batch = on_servers(lambda: desk.probe(actor.version))
        scores = actor.score(batch)

    def compare() -> None:
        temperature = desk.recipe.rollout.temperature
        max_gap, mean_gap = desk.recipe.algorithm.gap_bounds
        try:
            metrics = check_agreement(batch, scores.logprobs, max_gap=max_gap, mean_gap=mean_gap)
        except OnPolicyError:
            raise OnPolicyError(explain_gap(batch, scores, desk.probed, desk)) from None
        desk.log.note(
            f"servers and actor agree on {int(batch.loss_mask.sum())} probe tokens at temperature "
            f"{temperature:g}: logprob gap max {metrics['on_policy/logprob_gap_max']:.2g}"
        )

    driver.run(compare)


def export(actor: Actor, desk: Desk, driver: Driver, required: bool) -> None:
    """Write the policy as a Hugging Face model directory, hf/step_N of the run, then drop all but
    the newest `checkpoint.keep_hf`. Only a failure of a `required` one is an error."""
    recipe = actor.recipe
    weights = export_hf(actor.modules, actor.hf_config, actor.dtype)
    target = recipe.run_path / EXPORTS / f"step_{actor.version}"

    def write() -> None:
        try:
            if target.exists():  # of a run that was resumed from before this step
                target.rename(target.with_name(f"{target.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
            save_hf(target, weights, source=Path(recipe.model.path))
            if recipe.checkpoint.keep_hf is not None:
                for old in exports(recipe.run_path)[: -recipe.checkpoint.keep_hf]:
                    shutil.rmtree(old)
        except (CheckpointError, OSError) as error:
            problem = f"the model of step {actor.version} was not exported: {error}"
            if required:
                raise CheckpointError(problem) from error
            desk.log.warn(f"{problem}; training goes on without it")
        finally:
            deque(weights, maxlen=0)  # the other ranks give their parts to the end

    with phase(desk, driver, "export"):
        driver.run(write, meanwhile=lambda: deque(weights, maxlen=0))


def is_due(every: int, version: int) -> bool:
    return every > 0 and version % every == 0
