"""What rank 0 owns: prompts, rollout servers, reward workers and the run's log."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_opo.batch import Group, PackedBatch, Prompt, pack
from megatron_opo.environment import versions
from megatron_opo.observe.run_log import RunLog
from megatron_opo.prompts import (
    PromptCursor,
    PromptSet,
    check_tokenizer,
    load_prompts,
    load_tokenizer,
)
from megatron_opo.recipe import Recipe, dump_recipe
from megatron_opo.rewards import RewardPool
from megatron_opo.rollout import Rollout, Server, close_servers, launch_servers, wait_healthy

PROBE_PROMPTS = 4
PROBE_TOKENS = 32


@dataclass
class Desk:
    """`groups` are the scored groups of the step in hand, for its metrics and samples."""

    recipe: Recipe
    log: RunLog
    cursor: PromptCursor
    prompts: PromptSet
    eval_prompts: PromptSet | None
    rewards: RewardPool
    rollout: Rollout
    groups: list[Group] = field(default_factory=list)

    def wait_until_ready(self) -> None:
        """Servers healthy, reward workers warm."""
        with self.log.phase("start"):
            wait_healthy(
                self.rollout.servers, self.recipe.rollout.start_timeout_s, on_wait=self._show_wait
            )
            self.rewards.wait_ready()

    def _show_wait(self, server: Server, seconds: float, last_line: str) -> None:
        self.log.advance(seconds, None, f"waiting for {server.name} to load: {last_line}")

    def generate(self, prompts: list[Prompt], version: int) -> list[Group]:
        config = self.recipe.rollout
        return self.rollout.generate(
            prompts,
            samples_per_prompt=config.samples_per_prompt,
            version=version,
            temperature=config.temperature,
            max_response_tokens=config.max_response_tokens,
            stop_token_ids=config.stop_token_ids,
            on_sample=self._progress(len(prompts) * config.samples_per_prompt),
        )

    def generate_eval(self, version: int) -> list[Group]:
        """`eval.samples_per_prompt` responses to every held-out prompt."""
        assert self.eval_prompts is not None
        config, prompts = self.recipe.eval, list(self.eval_prompts.prompts)
        return self.rollout.generate(
            prompts,
            samples_per_prompt=config.samples_per_prompt,
            version=version,
            temperature=config.temperature,
            top_p=config.top_p,
            max_response_tokens=self.recipe.rollout.max_response_tokens,
            stop_token_ids=self.recipe.rollout.stop_token_ids,
            on_sample=self._progress(len(prompts) * config.samples_per_prompt),
        )

    def score(self, groups: list[Group]) -> list[Group]:
        return self.rewards.score(
            groups, on_sample=self._progress(sum(len(group.samples) for group in groups))
        )

    def probe(self, version: int) -> PackedBatch:
        """A few short responses with the servers' logprobs, to hold against the actor's."""
        groups = self.rollout.generate(
            list(self.prompts.prompts[:PROBE_PROMPTS]),
            samples_per_prompt=2,
            version=version,
            temperature=self.recipe.rollout.temperature,
            max_response_tokens=min(PROBE_TOKENS, self.recipe.rollout.max_response_tokens),
        )
        unscored = [
            group.with_samples(replace(sample, reward=0.0) for sample in group.samples)
            for group in groups
        ]
        return pack(unscored)

    def rollout_metrics(self) -> dict[str, float]:
        """Of the step in hand."""
        stats = self.rollout.stats
        seconds = max(stats.seconds, 1e-9)
        return {
            "rollout/retries": stats.retries,
            "perf/generate_tokens_per_second": stats.response_tokens / seconds,
        }

    def _progress(self, total: int):
        done = 0

        def on_sample(*_: Any) -> None:
            nonlocal done
            done += 1
            self.log.advance(done, total)

        return on_sample

    def close(self) -> None:
        self.rollout.close()
        self.rewards.close()
        self.log.close()


def open_desk(
    recipe: Recipe,
    hf_config: dict,
    device: str,
    first_step: int,
    cursor_state: dict[str, Any] | None,
) -> Desk:
    """Load the data and start servers and reward workers; does not wait for them.

    Args:
        device: "cpu" or "cuda", for the servers.
        first_step: steps already trained, from the checkpoint.
        cursor_state: the prompt cursor's, from the checkpoint.
    """
    tokenizer = load_tokenizer(recipe.model.path)
    check_tokenizer(tokenizer, hf_config["vocab_size"])
    train_prompts = load_prompts(recipe.data.train, recipe.data, tokenizer, "train")
    eval_prompts = None
    if recipe.data.eval is not None:
        eval_prompts = load_prompts(recipe.data.eval, recipe.data, tokenizer, "eval")
    cursor = PromptCursor(train_prompts, shuffle=recipe.data.shuffle, seed=recipe.seed)
    if cursor_state is not None:
        cursor.restore(cursor_state)
    log = RunLog(
        recipe.run_path,
        recipe_text=dump_recipe(recipe),
        versions=versions(),
        total_steps=recipe.train.steps,
        wandb_project=recipe.log.wandb_project,
        samples_per_step=recipe.log.samples_per_step,
        first_step=first_step,
    )
    log.note(train_prompts.summary())
    if eval_prompts is not None:
        log.note(eval_prompts.summary())
        seen = {prompt.token_ids for prompt in train_prompts.prompts}
        shared = sum(prompt.token_ids in seen for prompt in eval_prompts.prompts)
        if shared:
            log.warn(
                f"{shared} of {len(eval_prompts.prompts)} eval prompts are training prompts too: "
                "the evaluation is not held out"
            )
    with ExitStack() as undo:
        undo.callback(log.close)
        rewards = RewardPool(recipe.reward)
        undo.callback(rewards.close)
        servers = launch_servers(recipe.rollout, recipe.model, recipe.run_path / "logs", device)
        undo.callback(close_servers, servers)
        rollout = Rollout(
            servers,
            recipe.rollout,
            recipe.sync,
            recipe.model,
            disk_dir=recipe.run_path / "sync",
        )
        undo.pop_all()
    return Desk(recipe, log, cursor, train_prompts, eval_prompts, rewards, rollout)
