"""The rules of servers, layout, rewards and trainer that look at more than their own value."""

from typing import Any, get_args

from megatron_opo.import_verl.rules import Outcome, Script, flag, number, shown, text, whole
from megatron_opo.import_verl.special import ACTOR, ROLLOUT, home
from megatron_opo.recipe import OWN_SERVER_OPTIONS, LoggerName

MEGATRON = f"{ACTOR}.megatron"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
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
    # verl's own default of 2 counts where the script is silent.
    if gpus % each:
        fill = {"rollout.servers": f"{gpus} GPUs are no multiple of tensor_parallel {each}"}
        return Outcome("changed", "one server per tensor_parallel GPUs", {}, fill)
    why = (
        f"{gpus} GPUs / rollout.tensor_parallel {each}; how many nodes and processes there are, "
        "the launcher says (slurm/, torchrun)"
    )
    fields = {"rollout.servers": gpus // each, "rollout.tensor_parallel": each}
    return Outcome("changed", why, fields)


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


def reward_option(value: Any, script: Script, key: str) -> Outcome:
    name = key.partition("reward_kwargs.")[2]
    return Outcome("taken over", "", {f"reward.kwargs.{name}": value})


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


METRICS_PORT = 9400
# verl's default of trainer.project_name.
VERL_PROJECT = "verl_examples"


def logger(value: Any, script: Script, key: str) -> Outcome:
    names = [text(each) for each in (value if isinstance(value, list) else [value])]
    known = [name for name in get_args(LoggerName) if name in names]
    fields: dict[str, Any] = {}
    if known:
        fields["log.loggers"] = known
    if set(known) - {"tensorboard"}:
        fields["log.project"] = text(script.get("trainer.project_name") or VERL_PROJECT)
    others = [name for name in names if name not in (*known, "console", "file")]
    if others:
        there = ", ".join(get_args(LoggerName))
        return Outcome("not supported", f"{', '.join(others)}: there are {there}", fields)
    why = "a line a step and metrics.jsonl always"
    if "wandb" in names:
        why += "; wandb is offline unless WANDB_MODE=online is set"
    return Outcome("taken over", why, fields)


def project(value: Any, script: Script, key: str) -> Outcome:
    return Outcome("taken over", "", {"log.project": text(value)})


def prometheus(value: Any, script: Script, key: str) -> Outcome:
    if not flag(value):
        return Outcome("taken over", "off, as is the default here")
    why = "verl's port is that of Prometheus itself; here it is what the trainer listens on"
    return Outcome("changed", why, {"log.prometheus_port": METRICS_PORT})


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


def run_directory(value: Any, script: Script, key: str) -> Outcome:
    if value is None:
        return Outcome("taken over", "null: runs/{name}")
    path = home(text(value), script)
    if set("{}$") & set(path):
        why = "runs/{name}: the path cannot be known here"
        return Outcome("changed", why, {}, {"run_dir": f"where to write, was {path}"})
    why = "all of a run is there: checkpoints, metrics, samples, logs; give a directory of its own"
    return Outcome("taken over", why, {"run_dir": path})
