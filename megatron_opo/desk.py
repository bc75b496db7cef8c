"""What rank 0 owns: prompts, rollout servers, reward workers and the run's log."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_opo.advantages.advice import contradictions
from megatron_opo.batch import Group, PackedBatch, Prompt, Sample, pack
from megatron_opo.checkpoint_files import Found, remove_leftovers, set_aside
from megatron_opo.dynamic_sampling import Drawn, draw_metrics
from megatron_opo.environment import versions
from megatron_opo.observe.console import Console
from megatron_opo.observe.metrics import eval_metrics
from megatron_opo.observe.prometheus import Exposed
from megatron_opo.observe.run_log import RunLog
from megatron_opo.prompts import (
    PromptCursor,
    PromptSet,
    check_tokenizer,
    hold_out,
    load_prompts,
    load_tokenizer,
)
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe
from megatron_opo.rewards import REWARD_LOG, RewardPool, Scoring
from megatron_opo.rollout import (
    Rollout,
    RolloutStats,
    Server,
    ServersLostError,
    SharedBucket,
    SyncStats,
    wait_healthy,
)
from megatron_opo.rollout.episode import Play, load_play
from megatron_opo.rollout.rate import TokenRate, waiting_for
from megatron_opo.runs import (
    ATTEMPT_VARIABLE,
    BestEval,
    changed_fields,
    check_attempt,
)
from megatron_opo.spans import Spans
from megatron_opo.spmd import Driver
from megatron_opo.start_summary import summary_rows
from megatron_opo.stop import StopRequest

T = TypeVar("T")

# Of a prompt whose group was given up (rollout.extra_prompts).
MOST_TIMES_BACK = 2
PROBE_PROMPTS = 4
PROBE_TOKENS = 32
# Of why samples have no reward: in a run, and at once.
MOST_REASONS, SHOWN_REASONS = 20, 3


@dataclass
class Desk:
    """`drawn`, `drawn_from` (the cursor's state before) and `samplings` are of the step in hand;
    `skipped_updates` were skipped since the last one; `servers_lost` is of the latest
    `unless_servers_lost`; `owes_eval` while an evaluation has begun and is not logged; `reasons`
    are those that were shown for samples without a reward, without their digits; `probed` was the
    latest probe."""

    recipe: Recipe
    log: RunLog
    cursor: PromptCursor
    prompts: PromptSet
    eval_prompts: PromptSet | None
    rewards: RewardPool
    rollout: Rollout
    stop: StopRequest
    resources: ExitStack
    play: Play | None = None
    best_eval: BestEval | None = None
    drawn: Drawn = field(default_factory=lambda: Drawn([], [], 0))
    drawn_from: dict[str, Any] = field(default_factory=dict)
    owes_eval: bool = False
    samplings: list[RolloutStats] = field(default_factory=list)
    skipped_updates: int = 0
    servers_lost: bool = False
    reasons: set[str] = field(default_factory=set)
    probed: list[Group] = field(default_factory=list)

    def wait_until_ready(self) -> None:
        """The servers answer."""
        with self.log.phase("servers"):
            wait_healthy(
                self.rollout.servers, self.recipe.rollout.start_timeout_s, on_wait=self._show_wait
            )

    def unless_servers_lost(self, work: Callable[[], T], may_repeat: bool) -> T | None:
        """The result of `work`, or None when it lost all servers; see `servers_lost`."""
        self.servers_lost = False
        try:
            return work()
        except ServersLostError as error:
            if not may_repeat:
                raise
            self.servers_lost = True
            self.log.warn(
                f"{error}\nSampling begins again when a server has been given the weights"
            )
            return None

    def wait_for_a_server(self) -> None:
        """One answers, so that it can be given weights, or a stop is asked for.

        Raises:
            ServerError: none will.
        """
        with self.log.phase("servers"):
            self.stop.unless_asked(lambda: self.rollout.wait_for_one(on_wait=self._show_wait))

    def sync(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncStats | None:
        """See `Rollout.sync`; None when servers were lost meanwhile."""
        try:
            with self.log.phase("sync"):
                return self.rollout.sync(weights, version)
        except ServersLostError as error:
            self.log.warn(str(error))
            return None

    def release_servers(self) -> None:
        """They give their memory back, and can sample again after the next sync."""
        self.rollout.release(on_wait=self._show_wait)

    def _show_wait(self, server: Server, seconds: float, last_line: str) -> None:
        self.log.advance(seconds, None, waiting_for(server, last_line))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "cursor": self.cursor.state(),
            "best_eval": asdict(self.best_eval) if self.best_eval else None,
            "run_id": self.log.run_id,
            "owes_eval": self.owes_eval,
        }

    def return_prompts(self) -> None:
        """The step in hand is not trained: its prompts are still to come."""
        self.cursor.restore(self.drawn_from)

    def log_eval(self, version: int, groups: list[Group]) -> None:
        metrics = eval_metrics(groups)
        self.warn_of_unscorable(groups, "count as 0 in this evaluation")
        name, value = next(item for item in metrics.items() if item[0].startswith("eval/avg@"))
        if self.best_eval is None or value > self.best_eval.value:
            self.best_eval = BestEval(name, value, version)
        metrics |= {"eval/best": self.best_eval.value, "eval/best_step": self.best_eval.step}
        self.log.eval(version, metrics)

    def warn_of_unscorable(self, groups: list[Group], consequence: str) -> None:
        """Samples without a reward, once for each kind of reason."""
        without = [s for group in groups for s in group.samples if s.reward is None]
        reasons = {re.sub(r"\d+", "#", str(s.reward_error)): s.reward_error for s in without}
        new = reasons.keys() - self.reasons
        if new and len(self.reasons) < MOST_REASONS:
            self.reasons |= new
            total = sum(len(group.samples) for group in groups)
            shown = "\n".join(sorted(str(reasons[kind]) for kind in new)[:SHOWN_REASONS])
            self.log.warn(
                f"{len(without)} of {total} samples have no reward and {consequence}:\n{shown}"
            )

    def start_step(self) -> None:
        check_attempt(self.recipe.run_path)
        self.samplings = []

    def sample_and_score(self, count: int, version: int) -> list[Group]:
        """So many groups, of the next prompts; each is scored as soon as it is there. With its
        greedy response where the estimator wants that."""
        with self.rewards.scoring() as scoring:
            with self.log.phase("generate"):
                groups = self._sample_next(count, version, scoring)
                greedy = self._sample_greedily(groups, version, scoring)
            with self.log.phase("reward"):
                scored = self._scored(scoring, [*groups, *greedy])
        return [
            replace(group, greedy=only.samples[0]) if only else group
            for group, only in zip_longest(scored[:count], scored[count:])
        ]

    def _sample_next(self, count: int, version: int, scoring: Scoring) -> list[Group]:
        """With rollout.extra_prompts: the first `count` that are there. The prompts of others come
        first the next time, and a second time; then they are waited for."""
        config = self.recipe.rollout
        prompts = self.cursor.next(count + config.extra_prompts)
        awaited = [p for p in prompts if self.cursor.times_back(p) >= MOST_TIMES_BACK]
        groups = self._sample(
            prompts,
            version,
            scoring,
            samples_per_prompt=config.samples_per_prompt,
            temperature=config.temperature,
            enough=count,
            required=awaited[:count],
        )
        there = {group.prompt.id for group in groups}
        self.cursor.take_back([prompt for prompt in prompts if prompt.id not in there])
        return groups

    def _sample_greedily(self, groups: list[Group], version: int, scoring: Scoring) -> list[Group]:
        if self.recipe.algorithm.estimator != "remax":
            return []
        prompts = [group.prompt for group in groups]
        return self._sample(prompts, version, scoring, samples_per_prompt=1, temperature=0.0)

    def _sample(
        self,
        prompts: list[Prompt],
        version: int,
        scoring: Scoring,
        *,
        samples_per_prompt: int,
        **settings: Any,
    ) -> list[Group]:
        """Groups that are being scored."""
        progress = self._progress(len(prompts) * samples_per_prompt, "samples")
        rate = TokenRate(self.rollout.serving)
        self.log.advance(0, len(prompts) * samples_per_prompt, "samples")
        self.log.ask(rate.shown)

        def on_group(group: Group) -> None:
            self.log.first_sample()
            scoring.add(group)
            rate.count(sum(sample.length for sample in group.samples))
            progress(*group.samples)

        groups = self.rollout.generate(
            prompts,
            samples_per_prompt=samples_per_prompt,
            version=version,
            max_response_tokens=self.recipe.rollout.max_response_tokens,
            stop_token_ids=self.recipe.rollout.stop_token_ids,
            on_group=on_group,
            play=self.play,
            **settings,
        )
        self.samplings.append(self.rollout.stats)
        return groups

    def _scored(self, scoring: Scoring, groups: list[Group]) -> list[Group]:
        samples = sum(len(group.samples) for group in groups)
        return scoring.results(groups, on_sample=self._progress(samples, "scored"))

    def sample_and_score_eval(self, version: int) -> list[Group]:
        """`eval.samples_per_prompt` responses to every held-out prompt."""
        assert self.eval_prompts is not None
        config = self.recipe.eval
        with self.rewards.scoring() as scoring:
            groups = self._sample(
                list(self.eval_prompts.prompts),
                version,
                scoring,
                samples_per_prompt=config.samples_per_prompt,
                purpose="eval",
                temperature=config.temperature,
                top_p=config.top_p,
            )
            return self._scored(scoring, groups)

    def probe(self, version: int) -> PackedBatch:
        """A few short responses with the servers' logprobs, to hold against the actor's."""
        groups = self.rollout.generate(
            list(self.prompts.prompts[:PROBE_PROMPTS]),
            samples_per_prompt=2,
            version=version,
            purpose="probe",
            temperature=self.recipe.rollout.temperature,
            max_response_tokens=min(PROBE_TOKENS, self.recipe.rollout.max_response_tokens),
        )
        self.probed = [
            group.with_samples(replace(sample, reward=0.0) for sample in group.samples)
            for group in groups
        ]
        return pack(self.probed)

    def rollout_metrics(self) -> dict[str, float]:
        """Of the step in hand; what dynamic sampling dropped is counted only here."""
        seconds = max(sum(stats.seconds for stats in self.samplings), 1e-9)
        tokens = sum(stats.response_tokens for stats in self.samplings)
        tail = sum(stats.tail_seconds for stats in self.samplings)
        read = sum(stats.read_tokens for stats in self.samplings)
        cached = sum(stats.cached_tokens for stats in self.samplings)
        metrics = {
            "rollout/retries": float(sum(stats.retries for stats in self.samplings)),
            "rollout/servers": float(len(self.rollout.serving)),
            "rollout/restarts": float(self.rollout.restarts),
            "rollout/tail_seconds": tail,
            "rollout/tail_share": tail / seconds,
            "rollout/cached_prompt_share": cached / max(read, 1),
            "perf/generate_tokens_per_second": tokens / seconds,
        }
        if self.recipe.rollout.extra_prompts:
            given_up = sum(stats.given_up for stats in self.samplings)
            metrics["rollout/groups_given_up"] = float(given_up)
        if self.recipe.rollout.dynamic_sampling.enabled:
            metrics |= draw_metrics(self.drawn)
        return metrics

    def _progress(self, total: int, unit: str) -> Callable[..., None]:
        done = 0

        def on_samples(*samples: Sample) -> None:
            nonlocal done
            done += len(samples)
            self.log.advance(done, total, unit)

        return on_samples

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.resources.__exit__(kind, error, traceback)


def open_desk(
    recipe: Recipe,
    hf_config: dict,
    device: str,
    found: Found,
    shared: SharedBucket | None,
    servers: list[Server],
    spans: Spans | None = None,
    console: Console | None = None,
    trains: bool = True,
) -> Desk:
    """Load the data and start reward workers.

    Args:
        device: "cpu" or "cuda", of the servers.
        found: what the run resumes from, and what it does not.
        shared: what weights are sent by, where that is shared memory.
        servers: which are starting.
        spans: those of this process.
        console: what has spoken to the user already.
        trains: false when only prompts are sampled.
    """
    if console is not None:
        console.start_phase("data")
    checkpoint = found.checkpoint
    with ExitStack() as resources:
        rewards = RewardPool(recipe.reward, reward_log(recipe.run_path))
        resources.callback(rewards.close)
        tokenizer = load_tokenizer(recipe.model.path)
        train_prompts, eval_prompts = load_data(recipe, hf_config, tokenizer)
        play = load_play(recipe.rollout, tokenizer)
        cursor = PromptCursor(train_prompts, shuffle=recipe.data.shuffle, seed=recipe.seed)
        if checkpoint is not None:
            cursor.restore(checkpoint.cursor)
        remove_leftovers(recipe.run_path)
        aside = {set_aside(path): problem for path, problem in found.damaged.items()}
        exposed = expose(recipe, found.version, resources)
        log = RunLog(
            recipe.run_path,
            recipe_text=dump_recipe(recipe),
            versions=versions(),
            total_steps=recipe.train.steps,
            loggers=recipe.log.loggers,
            project=recipe.log.project,
            exposed=exposed,
            samples_per_step=recipe.log.samples_per_step,
            first_step=found.version,
            attempt=os.environ.get(ATTEMPT_VARIABLE),
            console=console,
            run_id=checkpoint.run_id if checkpoint else None,
            spans=spans,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        resources.enter_context(log)
        for path, problem in aside.items():
            log.warn(f"a checkpoint is damaged, and now {path}: {problem}")
        log.summary(
            summary_rows(
                recipe,
                hf_config,
                train_prompts,
                eval_prompts,
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
                device=device,
                trains=trains,
            )
        )
        for warning in warnings_of(recipe, device, len(train_prompts.prompts)):
            log.warn(warning)
        if checkpoint is not None:
            log.note(f"resuming from {checkpoint.directory}")
            if found.unverified:
                log.warn("it was written without checksums: its files could not be verified")
            for change in changed_fields(checkpoint.recipe, recipe):
                log.warn(f"the recipe changed since then: {change}")
        if set(recipe.log.loggers) - {"tensorboard"}:
            log.note(f"metrics also go to {log.loggers.places}")
        if exposed is not None:
            log.note(scrape_addresses(exposed.address, servers, recipe))
        rewards.wait_ready()
        rollout = Rollout(
            servers,
            recipe.rollout,
            recipe.sync.model_copy(update={"transport": recipe.transport(device)}),
            recipe.model,
            disk_dir=recipe.run_path / "sync",
            seed=recipe.seed if recipe.rollout.is_deterministic(device) else None,
            device=device,
            shared=shared,
            warn=log.warn,
            spans=log.spans,
        )
        return Desk(
            recipe,
            log,
            cursor,
            train_prompts,
            eval_prompts,
            rewards,
            rollout,
            resources.enter_context(StopRequest(log.console.notice)),
            resources.pop_all(),
            play,
            checkpoint.best_eval if checkpoint else None,
        )


def expose(recipe: Recipe, first_step: int, resources: ExitStack) -> Exposed | None:
    """What Prometheus is shown, with log.prometheus_port; until `resources` are given up."""
    config = recipe.log
    if config.prometheus_port is None:
        return None
    exposed = Exposed(recipe.run_path.name, recipe.train.steps, first_step)
    resources.callback(exposed.serve(config.prometheus_host, config.prometheus_port))
    return exposed


def scrape_addresses(trainer: str, servers: list[Server], recipe: Recipe) -> str:
    """For the person who writes Prometheus' configuration."""
    lines = [f"Prometheus: {trainer} (trainer)"]
    if recipe.rollout.urls:
        what = "if it was started with --enable-metrics"
        lines += [f"Prometheus: {server.url}/metrics ({server.name}, {what})" for server in servers]
    elif recipe.rollout_to_launch.server_args.get("enable_metrics"):
        lines += [f"Prometheus: {server.url}/metrics ({server.name})" for server in servers]
    return "\n".join(lines)


def warnings_of(recipe: Recipe, device: str, prompts: int) -> list[str]:
    """What a run may do, but is seldom meant to."""
    found = contradictions(recipe)
    wanted = recipe.rollout.prompts_per_step
    if wanted > prompts:
        found.append(
            f"data.train has {prompts} prompts, rollout.prompts_per_step is {wanted}: some prompts "
            "come more than once in a step"
        )
    if device == "cpu" and recipe.model.dtype != "float32":
        found.append(
            "on a CPU model.dtype float32 is faster than bfloat16, and servers and actor agree to "
            "1e-5 nats instead of 1e-1"
        )
    return found


def reward_log(run_path: Path) -> Path:
    """Where `megatron-opo logs` finds it."""
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    directory = run_path / "logs"
    return (directory / attempt / "rank_0" if attempt else directory) / REWARD_LOG


def phase(desk: Desk | None, driver: Driver, name: str):
    """Of all ranks: a span on each, and shown as what is going on."""
    return desk.log.phase(name) if desk else driver.spans.of(name)


def load_data(
    recipe: Recipe, hf_config: dict, tokenizer: Any
) -> tuple[PromptSet, PromptSet | None]:
    """The prompts to train on and to evaluate."""
    check_tokenizer(tokenizer, hf_config["vocab_size"])
    train_prompts = load_prompts(recipe.data.train, recipe.data, tokenizer, "train")
    if recipe.data.eval is None:
        return train_prompts, None
    eval_prompts = load_prompts(recipe.data.eval, recipe.data, tokenizer, "eval")
    if recipe.data.hold_out_eval:
        train_prompts = hold_out(train_prompts, eval_prompts)
    return train_prompts, eval_prompts
