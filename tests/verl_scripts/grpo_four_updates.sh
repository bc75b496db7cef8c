set -x
export VLLM_USE_V1=1

gsm8k_train=$HOME/data/gsm8k/train.parquet
math_train="$HOME/data/math/train.parquet"
train_files="['$gsm8k_train', '$math_train']"
val_files="['$HOME/data/gsm8k/test.parquet']"

if [ "$DEBUG" = "1" ]; then
    train_files="['tiny.parquet']"
fi

python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="$train_files" \
    data.val_files="$val_files" \
    data.train_batch_size=1024 \
    data.truncation='left' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.entropy_coeff=0.01 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.top_p=0.95 \
    actor_rollout_ref.rollout.temprature=0.8 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    reward_model.enable=True \
    trainer.logger='["console","swanlab"]' \
    trainer.experiment_name='qwen2 7b/grpo' \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_training_steps=100 "$@" 2>&1 | tee run.log
