#!/usr/bin/env bash
set -xeuo pipefail

adv_estimator=reinforce_plus_plus_baseline
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
train_tp=${TP:-4}
EP=${EP:-8}
actor_tokens=$(((max_prompt_length + max_response_length) * 2))
run="moe-tp${train_tp}-ep${EP}"

DATA=(
    data.train_files="${TRAIN_FILE}"
    data.val_files="['/data/aime.parquet']"
    data.prompt_key=question
    data.train_batch_size=128
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
)
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_tokens}
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode="token-mean"
    actor_rollout_ref.actor.optim.clip_grad=1.0
    actor_rollout_ref.actor.optim.lr_decay_style=cosine
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${train_tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
)

ray job submit --runtime-env=env.yaml -- python3 -m verl.trainer.main_ppo \
    --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=${adv_estimator} \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    "${DATA[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4)) \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.experiment_name="${run}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=4 \
    trainer.total_epochs=10 \
    # trainer.save_freq=7 \
    trainer.save_freq=5
