"""The rules of data, model, algorithm and sampling that look at more than their own value."""

import re
from typing import Any

from megatron_opo.import_verl.rules import Apply, Outcome, Script, flag, number, shown, text, whole

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
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


def home(value: str, script: Script) -> str:
    return script.home + value[1:] if value == "~" or value.startswith("~/") else value


def run_name(value: Any, script: Script, key: str) -> Outcome:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip("._-")[:100] or "from_verl"
    if name == value:
        return Outcome("taken over", "", {"name": name})
    return Outcome("changed", "only letters, digits, . _ and - may stand in it", {"name": name})


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
