"""Megatron's optimizer from the recipe, and the learning rate as a pure function of the step.

A scheduler object would be state to restore, and could be advanced twice; a function cannot.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_opo.recipe import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Rate of the update that follows `step` finished ones.

    Linear warm-up reaches `lr` at update number warmup_steps; then constant, or a linear or cosine
    decay that reaches `min_lr` at the last update.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


def build_optimizer(
    config: OptimizerConfig, model: Sequence[MegatronModule], dtype: torch.dtype
) -> MegatronOptimizer:
    """Adam with decoupled weight decay over the DistributedDataParallel chunks of `model`."""
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
    )
    return get_megatron_optimizer(megatron_config, list(model))
