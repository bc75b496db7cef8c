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
MOST_PIPELINE = 16


@dataclass(frozen=True)
class Suggestion:
    """Overrides of the recipe that fit on `nodes` nodes, `rollout_nodes` of them for servers alone;
    `cost` grows with the size of the change."""

    overrides: dict[str, Any]
    nodes: int
    rollout_nodes: int
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
    nodes = plan.cluster.nodes
    while nodes <= plan.cluster.nodes * MOST_NODES:
        cluster = replace(plan.cluster, nodes=nodes)
        if not cluster.colocated:
            share = plan.cluster.rollout_nodes / plan.cluster.nodes
            cluster = replace(cluster, rollout_nodes=round(nodes * share))
        search = _Search(plan.recipe, config, config_path, plan.model, cluster, plan.work)
        found = search.run()
        if found:
            return found
        nodes *= 2
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
                cluster = self.cluster
                found.append(Suggestion(fitting, cluster.nodes, cluster.rollout_nodes, cost))
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
        actor, rollout = self.recipe.actor, self.recipe.rollout
        cheap = [NOTHING]
        if actor.recompute == "none":
            cheap.append(_Change({"actor.recompute": "full"}, 1))
        yield cheap
        yield [NOTHING, *self._micro_batches()]
        yield [NOTHING, *self._servers(rollout.tensor_parallel)]
        free = {} if actor.data_parallel is None else {"actor.data_parallel": None}
        architecture = self.model.architecture
        if architecture.experts is not None:
            yield [
                NOTHING,
                *(
                    _Change(
                        {"actor.expert_parallel": n} | free,
                        2 * _doublings(n, actor.expert_parallel),
                    )
                    for n in _divisors(architecture.experts.count)
                    if n > actor.expert_parallel
                ),
            ]
        tensor = [NOTHING]
        if actor.tensor_parallel > 1 and not actor.sequence_parallel:
            tensor.append(_Change({"actor.sequence_parallel": True}, 1))
        for n in _divisors(architecture.heads):
            if actor.tensor_parallel < n <= self.cluster.gpus_per_node:
                wider = {"actor.tensor_parallel": n, "actor.sequence_parallel": True} | free
                if actor.sequence_parallel:
                    del wider["actor.sequence_parallel"]
                tensor.append(_Change(wider, 3 * _doublings(n, actor.tensor_parallel)))
        yield tensor
        yield [
            NOTHING,
            *(
                _Change(
                    {"actor.pipeline_parallel": n} | free,
                    3 * _doublings(n, actor.pipeline_parallel),
                )
                for n in _divisors(architecture.layers)
                if actor.pipeline_parallel < n <= MOST_PIPELINE
            ),
        ]

    def _micro_batches(self) -> Iterator[_Change]:
        longest = self.recipe.data.max_prompt_tokens + self.recipe.rollout.max_response_tokens
        tokens, cost = self.recipe.actor.micro_batch_tokens, 0
        while tokens > longest:
            tokens, cost = max(tokens // 2, longest), cost + 1
            yield _Change({"actor.micro_batch_tokens": tokens}, cost)

    def _servers(self, now: int) -> Iterator[_Change]:
        for n in _divisors(self.model.architecture.heads):
            if n > self.cluster.gpus_per_node:
                continue
            most = self.cluster.server_gpus // n
            if n > now or (n == now and 0 < most < self.recipe.rollout.servers):
                change: dict[str, Any] = {} if n == now else {"rollout.tensor_parallel": n}
                if self.recipe.rollout.servers > most > 0:
                    change["rollout.servers"] = most
                yield _Change(change, 1 + 2 * _doublings(n, now))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _doublings(new: int, old: int) -> int:
    return math.ceil(math.log2(new / old))


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
