"""What to change in a recipe that does not fit: the smallest changes that a plan then accepts."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_opo.errors import RecipeError
from megatron_opo.plan.hardware import Cluster
from megatron_opo.plan.layout import Model
from megatron_opo.plan.planner import Memory, Plan, plan_memory
from megatron_opo.plan.timing import Workload
from megatron_opo.recipe import Recipe

SUGGESTIONS = 3
MOST_NODES = 8  # times those that are there
MOST_RANKS = 64  # of one parallel group
MOST_SHARED = 3  # doublings of context_parallel


@dataclass(frozen=True)
class Suggestion:
    """Overrides of the recipe that fit on `nodes` nodes; `cost` grows with the size of the
    change."""

    overrides: dict[str, Any]
    nodes: int
    cost: int

    def words(self) -> list[str]:
        return [f"{path}={_text(value)}" for path, value in self.overrides.items()]


@dataclass(frozen=True)
class _Change:
    overrides: dict[str, Any]
    cost: int


NOTHING = _Change({}, 0)


def suggest(plan: Plan, config: dict[str, Any], config_path: Path) -> list[Suggestion]:
    """The smallest changes first, none of them an extension of another; on more nodes only if
    nothing else helps. Empty if nothing was found."""
    times = 1
    while times <= MOST_NODES:
        apart = plan.cluster.rollout_nodes * times
        cluster = replace(plan.cluster, nodes=plan.cluster.nodes * times, rollout_nodes=apart)
        base = {"rollout.nodes": apart} if apart and times > 1 else {}
        recipe = apply(plan.recipe, base)
        found = _Search(recipe, base, config, config_path, plan.model, cluster, plan.work).run()
        if found:
            return found
        times *= 2
    return []


def apply(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    """Raises RecipeError if the result is not valid."""
    tree = recipe.model_dump()
    for path, value in overrides.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    try:
        return Recipe.model_validate(tree)
    except ValueError as error:
        raise RecipeError(str(error)) from None


@dataclass(frozen=True)
class _Search:
    recipe: Recipe
    base: dict[str, Any]
    config: dict[str, Any]
    config_path: Path
    model: Model
    cluster: Cluster
    work: Workload

    def run(self) -> list[Suggestion]:
        axes = list(self._axes())
        candidates = sorted(
            itertools.product(*axes), key=lambda changes: sum(change.cost for change in changes)
        )
        found: list[Suggestion] = []
        accepted: list[dict[str, Any]] = []
        for changes in candidates:
            overrides = {k: v for change in changes for k, v in change.overrides.items()}
            cost = sum(change.cost for change in changes)
            if any(smaller.items() <= overrides.items() for smaller in accepted):
                continue
            fitting = self._fitting(overrides)
            if fitting is not None:
                accepted.append(overrides)
                found.append(Suggestion(self.base | fitting, self.cluster.nodes, cost))
                if len(found) == SUGGESTIONS:
                    break
        return found

    def _fitting(self, overrides: dict[str, Any]) -> dict[str, Any] | None:
        """The overrides, if they fit; with the servers' share of memory, if that is all that is
        missing."""
        memory = self._memory(overrides)
        if memory is None or not memory.problems:
            return overrides if memory else None
        if not all(problem.fraction_only for problem in memory.problems):
            return None
        fraction = math.floor(memory.server.allowed * 100) / 100
        overrides = overrides | {"rollout.server_args.mem_fraction_static": fraction}
        memory = self._memory(overrides)
        return overrides if memory and not memory.problems else None

    def _memory(self, overrides: dict[str, Any]) -> Memory | None:
        try:
            recipe = apply(self.recipe, overrides)
            return plan_memory(
                recipe, self.config, self.config_path, self.model, self.cluster, self.work
            )
        except RecipeError:
            return None

    def _axes(self) -> Iterator[list[_Change]]:
        """For each field that matters: leave it, or one of the values that need less memory."""
        actor, architecture = self.recipe.actor, self.model.architecture
        for changes in (
            [_Change({"actor.recompute": "full"}, 1)] if actor.recompute == "none" else [],
            self._hand_over(),
            self._micro_batches(),
            self._servers(),
            self._tensor(),
            self._wider("actor.expert_parallel", actor.expert_parallel, self.model.experts, 2),
            self._wider("actor.pipeline_parallel", actor.pipeline_parallel, architecture.layers, 3),
        ):
            yield [NOTHING, *changes]

    def _hand_over(self) -> list[_Change]:
        rollout = self.recipe.rollout
        refused = rollout.hand_over_memory is False and rollout.shares_gpus("cuda")
        return [_Change({"rollout.hand_over_memory": True}, 1)] if refused else []

    def _micro_batches(self) -> Iterator[_Change]:
        """Smaller ones; and where they hold no more than a sequence, more ranks that share it."""
        longest = self.recipe.data.max_prompt_tokens + self.recipe.rollout.max_response_tokens
        actor, cost = self.recipe.actor, 0
        tokens, context = actor.micro_batch_tokens, actor.context_parallel
        while tokens > (least := -(-longest // context)):
            tokens, cost = max(tokens // 2, least), cost + 1
            yield _Change({"actor.micro_batch_tokens": tokens}, cost)
        for _ in range(MOST_SHARED):
            context, cost = 2 * context, cost + 3
            change = {"actor.context_parallel": context} | self._free()
            change["actor.micro_batch_tokens"] = -(-longest // context)
            yield _Change(change, cost)

    def _servers(self) -> Iterator[_Change]:
        """As many servers as before where their nodes hold them, else as many as there is room."""
        rollout, hosts = self.recipe.rollout, self.cluster.server_nodes
        now = rollout.tensor_parallel
        for tensor in _divisors(self.model.architecture.heads):
            most = self.cluster.gpus_per_node // tensor * hosts
            if tensor < now or most == 0:
                continue
            change: dict[str, Any] = {} if tensor == now else {"rollout.tensor_parallel": tensor}
            if rollout.servers % hosts or rollout.servers > most:
                change["rollout.servers"] = most
            if change:
                yield _Change(change, 1 + 2 * _doublings(tensor, now))

    def _tensor(self) -> Iterator[_Change]:
        actor = self.recipe.actor
        parallel = {} if actor.sequence_parallel else {"actor.sequence_parallel": True}
        if actor.tensor_parallel > 1 and parallel:
            yield _Change(parallel, 1)
        heads = self.model.architecture.heads
        for wider in self._wider("actor.tensor_parallel", actor.tensor_parallel, heads, 3):
            # Over the network it would be slow.
            if wider.overrides["actor.tensor_parallel"] <= self.cluster.gpus_per_node:
                yield _Change(wider.overrides | parallel, wider.cost)

    def _free(self) -> dict[str, Any]:
        return {} if self.recipe.actor.data_parallel is None else {"actor.data_parallel": None}

    def _wider(self, field: str, now: int, divides: int, cost: int) -> Iterator[_Change]:
        """Larger sizes of a parallel group; replicas are as many as GPUs are left for."""
        for size in _divisors(divides):
            if now < size <= MOST_RANKS:
                yield _Change({field: size} | self._free(), cost * _doublings(size, now))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _doublings(new: int, old: int) -> int:
    return math.ceil(math.log2(new / old))


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
