"""The rules that look at more than their own value, batches and steps aside."""

import re
from typing import Any

from megatron_opo.import_verl.rules import Apply, Outcome, Script, flag, number, shown, text, whole
from megatron_opo.recipe import OWN_SERVER_OPTIONS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
ESTIMATORS = {
    "opo": "opo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "optimal_token_baseline": "otb",
}
NO_ESTIMATOR = {
    "gae": "it needs a critic, and there is none; a baseline comes from the group's own rewards",
    "grpo_passk": "it rewards only the best response of a group",
    "gpg": "it scales GRPO's advantages by the share of groups that are not all equal",
    "gdpo": "it normalises several rewards one by one; there is one reward here",
    "tir_optimal_token_baseline": "it is for tool calls; `otb` is the one for plain responses",
}
# Fields of Megatron's TransformerConfig that the model, the layout or exactness decide here; and
# how the names of others of them begin.
DECIDED = {
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "apply_rope_fusion",
    "attention_backend",
    "attention_dropout",
    "hidden_dropout",
    "moe_aux_loss_coeff",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "moe_z_loss_coeff",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "sequence_parallel",
    "variable_seq_lengths",
}
DECIDED_PREFIXES = ("moe_router_", "tensor_model_", "pipeline_", "context_parallel")


def home(value: str, script: Script) -> str:
    return script.home + value[1:] if value == "~" or value.startswith("~/") else value


def run_name(value: Any, script: Script, key: str) -> Outcome:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip("._-")[:100] or "from_verl"
    if name == value:
        return Outcome("taken over", "", {"name": name})
    return Outcome("changed", "only letters, digits, . _ and - may stand in it", {"name": name})


def run_directory(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: runs/{name}")
    path = home(text(value), script)
    if set("{}$") & set(path):
        why = "runs/{name}: the path cannot be known here"
        return Outcome("changed", why, {}, {"run_dir": f"where to write, was {path}"})
    why = "all of a run is there: checkpoints, metrics, samples, logs; give a directory of its own"
    return Outcome("taken over", why, {"run_dir": path})


def model_path(value: Any, script: Script, key: str) -> Outcome:
    path = home(text(value), script)
    if HUB_NAME.fullmatch(path) and not path.startswith(("models/", "data/")):
        local = f"models/{path.split('/')[1]}"
        fill = f"a directory with the model: hf download {path} --local-dir {local}"
        why = "nothing is downloaded in a run: a local directory"
        return Outcome("changed", why, {"model.path": local}, {"model.path": fill})
    if path.startswith(("hdfs:", "s3:", "gs:")):
        fill = {"model.path": f"a local directory with what is at {path}"}
        return Outcome("changed", "a local directory", {"model.path": path}, fill)
    return Outcome("taken over", "", {"model.path": path})


def data_files(split: str) -> Apply:
    def apply(value: Any, script: Script, key: str) -> Outcome:
        field = f"data.{split}.files"
        if value is None or value == []:
            return Outcome("taken over", "none")
        values = value if isinstance(value, list) else [value]
        files = [home(text(each), script) for each in values]
        fill = {}
        if odd := [f for f in files if not f.endswith((".parquet", ".jsonl")) and "$" not in f]:
            fill[field] = f"parquet or jsonl files; {odd[0]} is neither"
        return Outcome("taken over", "verl's columns are read as they are", {field: files}, fill)

    return apply


def prompt_column(value: Any, script: Script, key: str) -> Outcome:
    fields = {"data.train.prompt_key": text(value)}
    if script.get("data.val_files"):
        fields["data.eval.prompt_key"] = text(value)
    return Outcome("taken over", "", fields)


def row_limit(split: str) -> Apply:
    def apply(value: Any, script: Script, key: str) -> Outcome:
        if value is None or whole(value) < 1:
            return Outcome("taken over", "all rows")
        return Outcome("taken over", "the first rows", {f"data.{split}.limit": whole(value)})

    return apply


def overlong_prompts(value: Any, script: Script, key: str) -> Outcome:
    """data.filter_overlong_prompts and data.truncation."""
    field = "data.overlong_prompts"
    if script.get("data.filter_overlong_prompts") is True:
        return Outcome("taken over", "too long prompts are left out", {field: "filter"})
    if script.get("data.truncation") in ("error", None):
        return Outcome("taken over", "too long prompts are an error", {field: "error"})
    why = "filter: a prompt is never cut, as its question would be another one"
    return Outcome("changed", why, {field: "filter"})


def estimator(value: Any, script: Script, key: str) -> Outcome:
    name = text(value)
    ours = ESTIMATORS.get(name)
    if ours is None:
        why = f"{name}: {NO_ESTIMATOR.get(name, 'there is none of this name')}; opo is set instead"
        return Outcome(
            "not supported",
            why,
            {"algorithm.estimator": "opo"},
            {"algorithm.estimator": "is opo what you want? docs/estimators.md has all"},
        )
    if ours == "grpo" and script.get("algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome(
            "taken over",
            "grpo that does not divide by the deviation is dr_grpo",
            {"algorithm.estimator": "dr_grpo"},
        )
    return Outcome("taken over", "", {"algorithm.estimator": ours})


def divides(value: Any, script: Script, key: str) -> Outcome:
    name = script.get("algorithm.adv_estimator")
    if ESTIMATORS.get(str(name)) != "grpo":
        return Outcome("taken over", f"no effect with {shown(name)}, in verl too")
    which = "grpo divides by the deviation" if flag(value) else "dr_grpo does not divide"
    return Outcome("taken over", f"in algorithm.estimator: {which}")


def kl_switch(value: Any, script: Script, key: str) -> Outcome:
    if flag(value) is False:
        return Outcome("taken over", "no KL term, as always here")
    return Outcome(
        "changed",
        "off: exact on-policy RL maximises the reward alone, and no reference model is loaded",
    )


def kl_coefficient(switch: str) -> Apply:
    def apply(value: Any, script: Script, key: str) -> Outcome:
        if value is None or number(value) == 0:
            return Outcome("taken over", "0: no KL term, as always here")
        if script.get(switch) is True:
            return Outcome("changed", f"0: see {switch}")
        return Outcome("taken over", f"no effect: {switch} is not True")

    return apply


def clip(value: Any, script: Script, key: str) -> Outcome:
    why = "on-policy the ratio is exactly 1, so there is nothing to clip"
    return Outcome("changed", why)


def entropy(value: Any, script: Script, key: str) -> Outcome:
    if value is None or number(value) == 0:
        return Outcome("taken over", "0: no entropy bonus, as always here")
    return Outcome("changed", "0: the reward alone is maximised; actor/entropy is still logged")


def learning_schedule(value: Any, script: Script, key: str) -> Outcome:
    name = text(value)
    if name in ("constant", "cosine", "linear"):
        return Outcome("taken over", "", {"optimizer.schedule": name})
    why = f"{name}: constant is set; allowed: constant, linear, cosine"
    return Outcome("not supported", why, {"optimizer.schedule": "constant"})


def lowest_rate(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: 0")
    lr = script.get(f"{ACTOR}.optim.lr")
    lowest = number(value) * (number(lr) if lr is not None else 1e-6)
    return Outcome("taken over", "a rate, not a share of lr", {"optimizer.min_lr": lowest})


def betas(value: Any, script: Script, key: str) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be two numbers")
    return Outcome("taken over", "", {"optimizer.betas": [number(each) for each in value]})


def truncated_sampling(field: str, neutral: float) -> Apply:
    def apply(value: Any, script: Script, key: str) -> Outcome:
        if value is None or number(value) == neutral or (field == "top_k" and number(value) <= 0):
            return Outcome("taken over", "the whole distribution is sampled, as always here")
        return Outcome(
            "changed",
            f"{neutral}: a truncated sampler draws from another distribution than the one that is "
            "trained (eval.top_p may be lower)",
        )

    return apply


def temperature(value: Any, script: Script, key: str) -> Outcome:
    if number(value) > 0:
        return Outcome("taken over", "", {"rollout.temperature": number(value)})
    return Outcome("changed", "1.0: greedy responses of a group would all be the same")


def eval_temperature(value: Any, script: Script, key: str) -> Outcome:
    """val_kwargs.temperature and val_kwargs.do_sample."""
    given = script.get(f"{ROLLOUT}.val_kwargs.temperature")
    degree = number(0 if given is None else given)
    if script.get(f"{ROLLOUT}.val_kwargs.do_sample") is True or degree == 0:
        return Outcome("taken over", "", {"eval.temperature": degree})
    return Outcome("changed", "0: do_sample is not True, so greedy", {"eval.temperature": 0.0})


def server_memory(value: Any, script: Script, key: str) -> Outcome:
    fields = {"rollout.server_args.mem_fraction_static": number(value)}
    if script.get(f"{ROLLOUT}.name") == "sglang":
        return Outcome("taken over", "SGLang's name for it", fields)
    return Outcome("changed", "SGLang's share is of weights and cache, without workspaces", fields)


def engine(value: Any, script: Script, key: str) -> Outcome:
    if value == "sglang":
        return Outcome("taken over", "SGLang generates, as always here")
    return Outcome("changed", "sglang: it is the one engine here")


def servers(value: Any, script: Script, key: str) -> Outcome:
    """trainer.n_gpus_per_node and trainer.nnodes."""
    whole(value)
    gpus = script.whole("trainer.n_gpus_per_node", 8) * script.whole("trainer.nnodes", 1)
    each = script.whole(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    if gpus % each:
        fill = {"rollout.servers": f"{gpus} GPUs are no multiple of tensor_parallel {each}"}
        return Outcome("changed", "one server per tensor_parallel GPUs", {}, fill)
    why = (
        f"{gpus} GPUs / rollout.tensor_parallel {each}; how many nodes and processes there are, "
        "the launcher says (slurm/, torchrun)"
    )
    return Outcome("changed", why, {"rollout.servers": gpus // each})


def dynamic_batch(value: Any, script: Script, key: str) -> Outcome:
    if flag(value):
        return Outcome("taken over", "micro-batches are filled by tokens, as always here")
    return Outcome("changed", "micro-batches are filled by tokens: actor.micro_batch_tokens")


def batch_tokens(value: Any, script: Script, key: str) -> Outcome:
    if script.get(f"{ACTOR}.use_dynamic_bsz") is True:
        return Outcome("taken over", "", {"actor.micro_batch_tokens": whole(value)})
    return Outcome("taken over", "no effect without use_dynamic_bsz, in verl too")


def batch_sequences(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: not set")
    if script.get(f"{ACTOR}.use_dynamic_bsz") is True:
        return Outcome("taken over", "no effect with use_dynamic_bsz, in verl too")
    prompt = script.whole("data.max_prompt_length", 512)
    longest = prompt + script.whole("data.max_response_length", 512)
    why = f"{whole(value)} sequences of at most {longest} tokens"
    return Outcome("changed", why, {"actor.micro_batch_tokens": whole(value) * longest})


def sequence_parallel(value: Any, script: Script, key: str) -> Outcome:
    if script.whole(f"{MEGATRON}.tensor_model_parallel_size", 1) > 1:
        return Outcome("taken over", "", {"actor.sequence_parallel": flag(value)})
    return Outcome("taken over", "no effect with tensor_parallel 1")


def virtual_stages(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: 1")
    if script.whole(f"{MEGATRON}.pipeline_model_parallel_size", 1) == 1:
        return Outcome("taken over", "no effect with pipeline_parallel 1")
    return Outcome("taken over", "", {"actor.virtual_pipeline": whole(value)})


def recompute(value: Any, script: Script, key: str) -> Outcome:
    field = "actor.recompute"
    if value in (True, "full"):
        return Outcome("taken over", "", {field: "full"})
    if value in (False, None):
        if script.get(f"{MEGATRON}.override_transformer_config.recompute_granularity") == "full":
            return Outcome("taken over", "recompute_granularity decides")
        return Outcome("taken over", "", {field: "none"})
    why = f"{shown(value)}: none is set; full is the other choice, if memory is short"
    return Outcome("not supported", why, {field: "none"})


def transformer_field(value: Any, script: Script, key: str) -> Outcome:
    name = key.rpartition(".")[2]
    if name.startswith("recompute_"):
        return Outcome("changed", "actor.recompute says what is recomputed")
    if name in DECIDED or name.startswith(DECIDED_PREFIXES):
        return Outcome("changed", "the model, the layout and exactness decide it here")
    why = "Megatron's own name, handed on"
    return Outcome("taken over", why, {f"actor.transformer_config.{name}": value})


def sglang_option(value: Any, script: Script, key: str) -> Outcome:
    name = key.rpartition(".")[2].replace("-", "_")
    if instead := OWN_SERVER_OPTIONS.get(name):
        return Outcome("not supported", instead)
    fields = {f"rollout.server_args.{name}": value}
    return Outcome("taken over", "SGLang's own name, handed on", fields)


def strategy(value: Any, script: Script, key: str) -> Outcome:
    if value == "megatron":
        return Outcome("taken over", "Megatron-Core trains, as always here")
    return Outcome(
        "changed",
        "Megatron-Core trains; FSDP spreads a model over all GPUs, here its layout is said",
        {},
        {
            "actor.tensor_parallel": "and pipeline_parallel, for a model larger than one GPU: "
            "`megatron-opo plan RECIPE` says what fits"
        },
    )


def megatron_checkpoint(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: weights come from model.path")
    if script.get(f"{MEGATRON}.use_dist_checkpointing") is not True:
        return Outcome("taken over", "no effect without use_dist_checkpointing, in verl too")
    path = home(text(value), script)
    return Outcome("taken over", "", {"model.megatron_checkpoint": path})


def reward_function(value: Any, script: Script, key: str) -> Outcome:
    """custom_reward_function.path and .name."""
    path = script.get("custom_reward_function.path")
    if path is None:
        return Outcome(
            "changed",
            "verl chooses a scorer by each row's data_source; here one function scores all",
            {"reward.function": "math"},
            {"reward.function": "math, numeric, exact or path/to/file.py:function"},
        )
    name = script.get("custom_reward_function.name") or "compute_score"
    function = f"{home(text(path), script)}:{name}"
    return Outcome("taken over", "called with verl's arguments", {"reward.function": function})


def overlong_responses(value: Any, script: Script, key: str) -> Outcome:
    """All of reward_kwargs.overlong_buffer_cfg."""
    leaf = key.rpartition(".")[2]
    if leaf == "log":
        return Outcome("changed", "rewards are logged always")
    if script.get(f"{OVERLONG}.enable") is not True:
        return Outcome("taken over", "off, as is the default here")
    length = whole(script.get(f"{OVERLONG}.len"))
    if length > script.whole("data.max_response_length", 512):
        raise ValueError("must be at most data.max_response_length")
    fields: dict[str, Any] = {
        "algorithm.truncated": "penalise",
        "algorithm.overlong_buffer": length,
    }
    if leaf == "penalty_factor":
        fields = {"algorithm.overlong_factor": number(value)}
    return Outcome("taken over", "", fields)


def logger(value: Any, script: Script, key: str) -> Outcome:
    names = [text(each) for each in (value if isinstance(value, list) else [value])]
    fields = {}
    if "wandb" in names:
        fields["log.wandb_project"] = text(script.get("trainer.project_name") or "verl_examples")
    others = [name for name in names if name not in ("wandb", "console", "tensorboard", "file")]
    if others:
        why = f"{', '.join(others)}: metrics.jsonl, TensorBoard files and wandb are what there is"
        return Outcome("not supported", why, fields)
    return Outcome("taken over", "console, metrics.jsonl and TensorBoard always", fields)


def project(value: Any, script: Script, key: str) -> Outcome:
    names = script.get("trainer.logger")
    if names == "wandb" or (isinstance(names, list) and "wandb" in names):
        return Outcome("taken over", "", {"log.wandb_project": text(value)})
    return Outcome("taken over", "no effect without wandb")


def kept_checkpoints(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        why = "the newest 2: null keeps all in verl; raise checkpoint.keep for more"
        return Outcome("changed", why)
    return Outcome("taken over", "", {"checkpoint.keep": whole(value)})


def resume(value: Any, script: Script, key: str) -> Outcome:
    if value in ("auto", None):
        return Outcome("taken over", "a run goes on from its newest checkpoint, as always here")
    if value == "disable":
        return Outcome("changed", "start with `megatron-opo train RECIPE --fresh`")
    why = (
        "verl's checkpoints are not read: merge one to a Hugging Face model, give it as model.path"
    )
    return Outcome("not supported", why)


def loss_mode(value: Any, script: Script, key: str) -> Outcome:
    if value in ("vanilla", None):
        return Outcome("taken over", "the policy gradient")
    if value in ("gspo", "sapo", "cispo", "geo_mean"):
        return Outcome(
            "changed",
            f"at a ratio of exactly 1 the gradient of {value} is the policy gradient, up to how "
            "lengths are weighed: algorithm.loss_aggregation",
        )
    return Outcome("not supported", f"{shown(value)}: the plain policy gradient is what there is")


def group_filter(value: Any, script: Script, key: str) -> Outcome:
    return Outcome("taken over", "", {"rollout.dynamic_sampling.enabled": flag(value)})


def filter_metric(value: Any, script: Script, key: str) -> Outcome:
    if value in (None, "seq_reward", "seq_final_reward", "score"):
        return Outcome("taken over", "groups whose rewards are all equal are replaced")
    return Outcome("changed", "the reward: groups whose rewards are all equal are replaced")


def filter_rounds(value: Any, script: Script, key: str) -> Outcome:
    if value is None or whole(value) < 1:
        return Outcome("changed", "8 rounds: it never goes on without end")
    return Outcome("taken over", "", {"rollout.dynamic_sampling.max_rounds": whole(value)})


def reward_option(value: Any, script: Script, key: str) -> Outcome:
    name = key.partition("reward_kwargs.")[2]
    return Outcome("taken over", "", {f"reward.kwargs.{name}": value})
