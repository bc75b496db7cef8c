"""Samples of a checkpoint, scored: servers and reward workers, and no trainer."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_opo.batch import Group, Prompt
from megatron_opo.errors import LogError
from megatron_opo.evaluation.source import (
    Source,
    as_evaluated,
    hugging_face,
    stored_weights,
)
from megatron_opo.evaluation.summary import SUMMARY, estimates, summarize, write_samples
from megatron_opo.model_fit import check_model
from megatron_opo.observe.console import Console
from megatron_opo.observe.files import replace_text
from megatron_opo.observe.text import duration
from megatron_opo.prompts import PromptSet, check_tokenizer, load_prompts, load_tokenizer
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe
from megatron_opo.rewards import REWARD_LOG, RewardPool
from megatron_opo.rollout import (
    Rollout,
    Server,
    ServersLostError,
    close_servers,
    launch_servers,
    wait_healthy,
)
from megatron_opo.rollout.episode import Play, find_function, load_play
from megatron_opo.rollout.rate import TokenRate, waiting_for
from megatron_opo.rows import check_files

# What servers call the weights; launched ones call those they start with so, too.
VERSION = 0
# Below --out: weights on their way to servers by disk.
SYNC = "sync"


@dataclass(frozen=True)
class _Stage:
    recipe: Recipe
    prompts: PromptSet
    rollout: Rollout
    rewards: RewardPool
    console: Console
    play: Play | None


def evaluate(
    recipe: Recipe, source: Source, samples: int, out: Path, console: Console
) -> dict[str, Any]:
    """Sample, score and write everything into `out`; the summary.

    Servers given by rollout.urls are sent the checkpoint's weights, and keep them.

    Raises:
        LogError: `out` holds an evaluation already, or cannot be written.
        OpoError: of the part that failed: recipe, data, reward function, checkpoint or servers.
    """
    given, recipe = recipe, as_evaluated(recipe, source.path, samples)
    assert recipe.data.eval is not None
    check_files(recipe.data.eval, "eval")
    find_function(recipe.rollout)
    make_out(out)
    replace_text(out / "recipe.yaml", dump_recipe(given))
    start = time.monotonic()
    with ExitStack() as held:
        directory = held.enter_context(hugging_face(source, recipe, out))
        recipe = as_evaluated(recipe, directory, samples)
        groups = _sample_and_score(recipe, source, out, console)
    # Before anything can go wrong with them: they may have taken hours.
    write_samples(out, groups, recipe.reward)
    with phase(console, "intervals"):
        found = estimates(groups, recipe.reward)
    summary = summarize(groups, found, recipe, source.path)
    summary["seconds"] = round(time.monotonic() - start, 1)
    replace_text(out / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def make_out(out: Path) -> None:
    """Raises LogError: it holds an evaluation, or cannot be made."""
    if (out / SUMMARY).exists():
        raise LogError(
            f"--out: {out} holds an evaluation already ({SUMMARY}): give another directory, or "
            "move that one away"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(
            f"--out: {out} cannot be made: {error.strerror}; give another directory"
        ) from None


@contextmanager
def phase(console: Console, name: str) -> Iterator[None]:
    console.start_phase(name)
    try:
        yield
    finally:
        console.end_phase()


def _sample_and_score(recipe: Recipe, source: Source, out: Path, console: Console) -> list[Group]:
    config = check_model(recipe)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as held:
        rewards = held.enter_context(RewardPool(recipe.reward, out / "logs" / REWARD_LOG))
        servers = launch_servers(recipe.rollout, recipe.model, out / "logs", device)
        held.callback(close_servers, servers)
        tokenizer = load_tokenizer(recipe.model.path)
        check_tokenizer(tokenizer, config["vocab_size"])
        assert recipe.data.eval is not None
        prompts = load_prompts(recipe.data.eval, recipe.data, tokenizer, "eval")
        play = load_play(recipe.rollout, tokenizer)
        console.start(_rows(recipe, source, prompts, out), out=str(out))
        rewards.wait_ready()
        rollout = _rollout(recipe, servers, out, device, console)
        held.callback(shutil.rmtree, out / SYNC, ignore_errors=True)
        held.callback(rollout.close)
        with phase(console, "servers"):
            wait_healthy(
                servers, recipe.rollout.start_timeout_s, on_wait=lambda *at: _show_wait(console, at)
            )
        return _collect(_Stage(recipe, prompts, rollout, rewards, console, play))


def _rollout(
    recipe: Recipe, servers: list[Server], out: Path, device: str, console: Console
) -> Rollout:
    # Launched ones read the checkpoint themselves; only what is started again is given it, by the
    # way that needs no trainer on GPUs of its own.
    transport = "disk"
    if recipe.rollout.urls and recipe.sync.transport != "disk":
        transport = "distributed"
    return Rollout(
        servers,
        recipe.rollout,
        recipe.sync.model_copy(update={"transport": transport}),
        recipe.model,
        disk_dir=out / SYNC,
        seed=recipe.seed if recipe.rollout.is_deterministic(device) else None,
        device=device,
        warn=console.warn,
    )


def _rows(recipe: Recipe, source: Source, prompts: PromptSet, out: Path) -> list[tuple[str, str]]:
    rollout, evaluation = recipe.rollout, recipe.eval
    kind = "Megatron checkpoint, converted" if source.is_megatron else "Hugging Face"
    return [
        ("checkpoint", f"{source.path} ({kind})"),
        ("data", prompts.summary()),
        (
            "samples",
            f"{evaluation.samples_per_prompt} a prompt, up to {rollout.max_response_tokens} "
            f"tokens, temperature {evaluation.temperature:g}, top_p {evaluation.top_p:g}",
        ),
        ("reward", recipe.reward.function),
        (
            "servers",
            f"{len(rollout.urls)} given by URL"
            if rollout.urls
            else f"{rollout.servers} x tensor_parallel {rollout.tensor_parallel}",
        ),
        ("out", str(out)),
    ]


def _show_wait(console: Console, at: tuple[Server, float, str]) -> None:
    server, seconds, last_line = at
    console.advance(seconds, None, waiting_for(server, last_line))


def _collect(stage: _Stage) -> list[Group]:
    """The scored groups, in the order of their prompts. Those that are there when all servers are
    lost are kept; the others are sampled when one is back."""
    console, there = stage.console, {}
    total = len(stage.prompts) * stage.recipe.eval.samples_per_prompt
    with stage.rewards.scoring() as scoring:

        def on_group(group: Group) -> None:
            scoring.add(group)
            there[group.prompt.id] = group
            console.advance(len(there) * stage.recipe.eval.samples_per_prompt, total, "samples")

        start = time.monotonic()
        while missing := [p for p in stage.prompts.prompts if p.id not in there]:
            try:
                _sample(stage, missing, on_group)
            except ServersLostError as error:
                console.warn(f"{error}\nSampling goes on when a server has been given the weights")
                with phase(console, "servers"):
                    stage.rollout.wait_for_one(on_wait=lambda *at: _show_wait(console, at))
        console.line(f"sampled {total:,} responses in {duration(time.monotonic() - start)}")
        groups = [there[prompt.id] for prompt in stage.prompts.prompts]
        done = 0

        def on_sample(_: object) -> None:
            nonlocal done
            done += 1
            console.advance(done, total, "scored")

        with phase(console, "score"):
            return scoring.results(groups, on_sample)


def _sample(stage: _Stage, prompts: list[Prompt], on_group: Callable[[Group], None]) -> None:
    recipe, rollout = stage.recipe, stage.rollout
    if rollout.needs_sync or not rollout.serving:
        with phase(stage.console, "weights"):
            rollout.sync(stored_weights(Path(recipe.model.path)), VERSION)
    rate = TokenRate(rollout.serving)

    def on_scored(group: Group) -> None:
        rate.count(sum(sample.length for sample in group.samples))
        on_group(group)

    with phase(stage.console, "generate"):
        stage.console.ask(rate.shown)
        rollout.generate(
            prompts,
            samples_per_prompt=recipe.eval.samples_per_prompt,
            version=VERSION,
            temperature=recipe.eval.temperature,
            top_p=recipe.eval.top_p,
            max_response_tokens=recipe.rollout.max_response_tokens,
            stop_token_ids=recipe.rollout.stop_token_ids,
            purpose="eval",
            on_group=on_scored,
            play=stage.play,
        )
