"""The actor: scores a rollout and takes one optimizer step on it, in any parallel layout."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_opo.actor import finite
from megatron_opo.actor.correction import correction_metrics, importance_weights, whole_weights
from megatron_opo.actor.logprobs import token_logprobs
from megatron_opo.actor.loss import policy_gradient_loss, token_weights
from megatron_opo.actor.model import build_model, output_weight
from megatron_opo.actor.offload import UpdateMemory
from megatron_opo.actor.optimizer import build_optimizer, learning_rate
from megatron_opo.actor.packing import MicroBatch, Sharing, make_micro_batch
from megatron_opo.actor.parallel import Parallel
from megatron_opo.actor.schedule import plan_micro_batches
from megatron_opo.actor.server_operations import use_server_operations
from megatron_opo.actor.timers import MegatronTimers
from megatron_opo.batch import PackedBatch
from megatron_opo.errors import NonFiniteError, OnPolicyError, TrainingError
from megatron_opo.on_policy import check_agreement
from megatron_opo.plan.flops import forward_flops
from megatron_opo.plan.hardware import peak_flops
from megatron_opo.plan.layout import model_of
from megatron_opo.recipe import Recipe
from megatron_opo.spmd import Driver
from megatron_opo.weights.hf_config import read_architecture


@dataclass(frozen=True)
class Scores:
    """What the actor thinks of each token of a rollout; [T] float32, 0 outside the loss mask."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    sum_squared_probs: torch.Tensor


class Actor:
    """The trained policy. `version` counts its optimizer steps; `scores` are of the latest update,
    by the policy before it.

    All ranks construct it and call its methods together; rollouts are given, and results returned,
    on rank 0 of `driver` only: elsewhere `batch` and the scores are None, whatever their type says.
    """

    def __init__(self, recipe: Recipe, hf_config: dict, parallel: Parallel, driver: Driver):
        self.recipe = recipe
        self.hf_config = hf_config
        self.parallel = parallel
        self.driver = driver
        self.spans = driver.spans
        self.version = 0
        self.scores: Scores | None = None
        correction = recipe.algorithm.correction
        self.correction = None if correction.kind == "none" else correction
        # How many of a rank's micro-batches have begun, of how many, for who waits for them.
        self.on_micro_batch: Callable[[int, int], None] = lambda done, total: None
        self.dtype = getattr(torch, recipe.model.dtype)
        self.modules = build_model(hf_config, recipe.actor, recipe.model.dtype)
        on_cpu = parallel.device.type == "cpu"
        self._as_servers = on_cpu and recipe.rollout.is_deterministic("cpu")
        if self._as_servers:
            for module in self.modules:
                use_server_operations(module)
        self.config = get_model_config(self.modules[0])
        # Sums, not means: the loss weights already hold the global denominators.
        self.config.calculate_per_token_loss = True
        self.config.finalize_model_grads_func = _sum_model_grads
        self.config.timers = MegatronTimers(self.spans)
        self.model = wrap_for_gradients(self.modules, self.config, recipe)
        self.optimizer = build_optimizer(recipe.optimizer, self.model, self.dtype)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.memory = UpdateMemory(self.model, self.optimizer)
        self._shapes = model_of(read_architecture(hf_config))
        self._peak = None
        if parallel.device.type == "cuda" and self.dtype == torch.bfloat16:
            self._peak = peak_flops(torch.cuda.get_device_name(parallel.device))

    def weights_loaded(self) -> None:
        """Call after the modules' parameters were overwritten: the optimizer keeps its own copy."""
        self.optimizer.reload_model_params()

    def rescore(self, batch: PackedBatch) -> Scores:
        """As `score`, but whatever comes of it."""
        with torch.no_grad():
            return self._run(self._share(batch), forward_only=True)

    def score(self, batch: PackedBatch) -> Scores:
        """Logprob, entropy and sum of squared probabilities of every loss token; no gradient.

        Raises:
            NonFiniteError: a logprob is not finite.
        """
        scores = self.rescore(batch)
        self._refuse(self.driver.run(lambda: finite.nonfinite_logprobs(batch, scores.logprobs)))
        return scores if self.driver.is_here else None  # pyright: ignore[reportReturnType]

    def update(self, batch: PackedBatch, version: int) -> dict[str, float]:
        """One optimizer step on a rollout that was sampled by `version`; returns metrics.

        Raises:
            OnPolicyError: the rollout is not from the current policy (a second step on it, or a
                stale one), or servers and actor disagree about its tokens; nothing is applied.
            NonFiniteError: logprobs, loss or gradient are not finite; nothing is applied.
            TrainingError: the step made weights that are not finite. They are of no use any more.
        """
        if version != self.version:
            raise OnPolicyError(
                f"the rollout was sampled by policy version {version} but the policy is at "
                f"version {self.version}: exact on-policy training takes one optimizer step per "
                "rollout, on the rollout of the current policy"
            )
        assert not self.memory.is_away, "the optimizer's state is on the host"
        started = time.perf_counter()
        rollout = batch
        batch = self._share(batch)
        with self.spans.of("zero_gradient"):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        self.scores = scores = self._run(batch, forward_only=False)
        with self.spans.of("check"):
            self._refuse(self.driver.run(lambda: self._nonfinite(rollout, scores)))
            metrics = self.driver.run(lambda: self._check(rollout, scores))
        grad_norm = self._step()
        if not self.driver.is_here:
            return {}
        return metrics | {
            "actor/grad_norm": grad_norm,
            "actor/lr": self._learning_rate(self.version - 1),
            **self._speed(batch, time.perf_counter() - started),
        }

    def token_values(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """On rank 0, of the batch of the newest update: what it found for each token, [T] each."""
        assert self.scores is not None, "no update was made"
        gaps = (self.scores.logprobs - batch.rollout_logprobs).abs()
        return {"token_entropies": self.scores.entropy, "token_gaps": gaps}

    def _speed(self, batch: PackedBatch, seconds: float) -> dict[str, float]:
        """Of an update. Operations are the model's: what is recomputed counts once."""
        lengths, scored = batch.sequence_lengths.tolist(), int(batch.loss_mask.sum())
        operations = forward_flops(self._shapes, lengths, scored).model
        per_rank = operations / seconds / self.parallel.world_size
        speed = {
            "perf/update_tokens_per_second": batch.tokens.numel() / seconds,
            "perf/update_tflops_per_rank": per_rank / 1e12,
        }
        return speed | ({"perf/mfu": per_rank / self._peak} if self._peak else {})

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self.recipe.optimizer, self.recipe.train.steps)

    def _check(self, batch: PackedBatch, scores: Scores) -> dict[str, float]:
        max_gap, mean_gap = self.recipe.algorithm.gap_bounds
        metrics = check_agreement(batch, scores.logprobs, max_gap=max_gap, mean_gap=mean_gap)
        if self.correction is not None:
            metrics |= correction_metrics(batch, scores.logprobs, self.correction)
        metrics["actor/pg_loss"] = self._loss(batch, scores)
        metrics["actor/entropy"] = scores.entropy[batch.loss_mask].double().mean().item()
        return metrics

    def _loss(self, batch: PackedBatch, scores: Scores) -> float:
        losses = self._token_weights(batch) * batch.advantages
        if self.correction is not None:
            losses = losses * whole_weights(batch, scores.logprobs, self.correction)
        return -losses.double().sum().item()

    def _nonfinite(self, batch: PackedBatch, scores: Scores) -> str:
        problem = finite.nonfinite_logprobs(batch, scores.logprobs)
        loss = self._loss(batch, scores)
        return problem or ("" if math.isfinite(loss) else f"the loss is {loss}")

    def _refuse(self, problem: str) -> None:
        """Raise what rank 0 has found, on all ranks."""
        if problem := self.driver.say(problem):
            raise NonFiniteError(f"step {self.version + 1}: {problem}; nothing was applied")

    def _step(self) -> float:
        with self.spans.of("check_gradient"):
            self.optimizer.prepare_grads()
            self._refuse_gradient(float(self.optimizer.get_grad_norm()))
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.version)
            # Megatron leaves this to its scheduler: 0 for norms and biases.
            group["weight_decay"] = self.recipe.optimizer.weight_decay * group["wd_mult"]
        with self.spans.of("optimizer"):
            succeeded, grad_norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
        assert succeeded, "the optimizer skipped a step although the gradient was finite"
        with self.spans.of("check_weights"):
            broken = self._broken_weights()
        if any(broken):
            raise TrainingError(
                f"step {self.version + 1} made weights that are not finite "
                f"({finite.by_rank(broken)}). They were neither sent nor saved; lower optimizer.lr "
                "and start again to go on from the newest checkpoint"
            )
        self.version += 1
        return float(grad_norm)

    def has_finite_weights(self) -> bool:
        """Of all ranks, on all ranks."""
        return not any(self._broken_weights())

    def _broken_weights(self) -> list[str]:
        return self.driver.gather(finite.nonfinite_names(finite.weights(self.modules)))

    def _refuse_gradient(self, norm: float) -> None:
        """A rank's norm leaves out what others hold, too: each looks at all of its own."""
        found = self.driver.gather(finite.nonfinite_names(finite.gradients(self.modules)))
        if not any(found):
            found = self.driver.gather("" if math.isfinite(norm) else f"its norm is {norm}")
        if any(found):
            raise NonFiniteError(
                f"step {self.version + 1}: the gradient is not finite ({finite.by_rank(found)}); "
                "nothing was applied"
            )

    def _token_weights(self, batch: PackedBatch) -> torch.Tensor:
        return token_weights(
            batch, self.recipe.algorithm.loss_aggregation, self.recipe.rollout.max_response_tokens
        )

    def _share(self, batch: PackedBatch | None) -> PackedBatch:
        """The rollout on every rank: what training needs of it."""
        names = ["tokens", "loss_mask", "advantages", "cu_seqlens"]
        if self.correction is not None:
            names.append("rollout_logprobs")
        tensors = None
        if batch is not None:
            tensors = [getattr(batch, name) for name in names]
            tensors[0] = tensors[0].to(torch.int32)
        shared = dict(zip(names, self.driver.share(tensors), strict=True))
        if batch is not None:
            return replace(batch, **shared)
        nothing = torch.zeros(0)
        left_out = ("rollout_logprobs", "group_offsets", "rewards", "sample_ids")
        return PackedBatch(**(dict.fromkeys(left_out, nothing) | shared))

    def _run(self, batch: PackedBatch, *, forward_only: bool) -> Scores:
        """All micro-batches of this rank; scores of the whole rollout (complete on rank 0)."""
        parallel, actor = self.parallel, self.recipe.actor
        with self.spans.of("pack"):
            micro_batches = self._micro_batches(batch)
            weights = self._token_weights(batch)
        scores = torch.zeros(3, batch.tokens.numel())
        corrects = self.correction is not None and not forward_only
        counter = count(1)
        total = len(micro_batches) * len(self.model)

        def forward_step(*given: Any):
            self.on_micro_batch(next(counter), total)
            return self._forward_step(
                *given,
                advantages=batch.advantages,
                weights=weights,
                scores=scores,
                rollout_logprobs=batch.rollout_logprobs if corrects else None,
            )

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.model],
            model=list(self.model),
            num_microbatches=len(micro_batches),
            seq_length=actor.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if parallel.device.type == "cuda":
            with self.spans.of("finish_kernels"):
                torch.cuda.synchronize(parallel.device)
        # Each token was written by one rank, so the sum is a gather.
        with self.spans.of("gather"):
            dist.reduce(scores, 0, group=parallel.control)
        return Scores(*scores)

    def _micro_batches(self, batch: PackedBatch) -> list[MicroBatch]:
        """Those of this rank."""
        parallel, actor = self.parallel, self.recipe.actor
        sharing = Sharing(
            parallel.cp_rank,
            parallel.cp_size,
            split=parallel.tp_size if self.config.sequence_parallel else 1,
        )
        plan = plan_micro_batches(
            [sharing.padded(length) for length in batch.sequence_lengths.tolist()],
            parallel.dp_size,
            actor.micro_batch_tokens * parallel.cp_size,
            # Chunks of a stage take turns with groups of as many micro-batches as there are stages.
            multiple_of=parallel.pp_size if actor.virtual_pipeline > 1 else 1,
        )[parallel.dp_rank]
        return [make_micro_batch(batch, sequences, sharing) for sequences in plan]

    def _forward_step(
        self,
        micro_batches: Iterator[MicroBatch],
        model: torch.nn.Module,
        *,
        advantages: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
        rollout_logprobs: torch.Tensor | None,
    ):
        micro_batch = next(micro_batches)
        device = self.parallel.device
        hidden = model(
            input_ids=micro_batch.tokens[None].to(device),
            packed_seq_params=micro_batch.packed_seq_params(device),
        )

        def loss_function(hidden: torch.Tensor):
            token_scores = self._score_rows(hidden, model, micro_batch)
            places = micro_batch.places
            if self.parallel.tp_rank == 0:
                scores[0, places] = token_scores.logprobs.detach().cpu()
                scores[1, places] = token_scores.entropy.cpu()
                scores[2, places] = token_scores.sum_squared_probs.cpu()
            counts = weights[places].to(device)
            if rollout_logprobs is not None:
                sampled = rollout_logprobs[places].to(device)
                counts = counts * self._importance(token_scores.logprobs, sampled, micro_batch)
            loss = policy_gradient_loss(
                token_scores.logprobs, advantages[places].to(device), counts
            )
            return loss, torch.zeros((), dtype=torch.int, device=device), {}

        return hidden, loss_function

    def _importance(
        self, logprobs: torch.Tensor, sampled: torch.Tensor, micro_batch: MicroBatch
    ) -> torch.Tensor:
        assert self.correction is not None
        return importance_weights(
            logprobs,
            sampled,
            micro_batch.sequences.to(logprobs.device),
            micro_batch.num_sequences,
            self.correction,
            group=parallel_state.get_context_parallel_group(),  # pyright: ignore[reportArgumentType]
        )

    def _score_rows(self, hidden, model, micro_batch: MicroBatch):
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        return token_logprobs(
            hidden.squeeze(1)[micro_batch.rows.to(hidden.device)],
            output_weight(model.module),
            micro_batch.targets.to(hidden.device),
            temperature=self.recipe.rollout.temperature,
            vocab_size=self.hf_config["vocab_size"],
            chunk_tokens=self.recipe.actor.logprob_chunk_tokens,
            group=parallel_state.get_tensor_model_parallel_group(),  # pyright: ignore[reportArgumentType]
            whole=self._as_servers,
        )


def wrap_for_gradients(
    modules: Sequence[MegatronModule], config: TransformerConfig, recipe: Recipe
) -> list[DistributedDataParallel]:
    """Chunks whose gradients are summed over data-parallel ranks, in float32."""
    bucket_mb = recipe.actor.grad_bucket_mb
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=recipe.optimizer.distributed,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=bucket_mb is not None,
        bucket_size=None if bucket_mb is None else max(1, round(bucket_mb * 2**20 / 4)),
    )
    chunks = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    if bucket_mb is not None:
        # Only the last micro-batch's gradients are whole.
        waits = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]  # pyright: ignore[reportAttributeAccessIssue]
    return chunks


def _sum_model_grads(model, num_tokens=None, **groups):
    """Megatron would divide by its own count of tokens; the loss weights have done so."""
    del num_tokens
    finalize_model_grads(model, None, **groups)
