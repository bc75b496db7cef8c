"""The rules of what verl weighs and masks by the ratio trainer / server. A recipe has one of these.

verl's newer names are in `algorithm.rollout_correction`: `rollout_is` gives weights, `rollout_rs`
leaves out; before that `algorithm.rollout_is` was True or False, and still earlier there was
`actor.tis_imp_ratio_cap`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_opo.import_verl.rules import Outcome, Script, number, shown

NEW = "algorithm.rollout_correction"
OLD = "algorithm.rollout_is"
CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
FIELD = "algorithm.correction"
LEVELS = ("token", "sequence", "geometric")
# verl's ways to leave out that look at the ratio itself.
REJECTIONS = {
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}
ONE = "a recipe has one correction, and it is that of {}"
KEPT_ARE_WEIGHED = "what is kept is weighed by its ratio, too"


def bounds(value: Any) -> tuple[float, float | None]:
    """The upper one, and the lower one if it is given: 2.0, or 0.5_5.0."""
    if isinstance(value, str):
        lower, _, upper = value.rpartition("_")
        return float(upper), float(lower) if lower else None
    return float(number(value)), None


def _weights(script: Script) -> Mapping[str, Any]:
    """Of `rollout_is`."""
    level = script.get(f"{NEW}.rollout_is")
    given = script.get(f"{NEW}.rollout_is_threshold")
    upper, lower = bounds(2.0 if given is None else given)
    return _fields("truncate" if lower is None else "mask", level, upper, lower)


def _old_weights(script: Script) -> Mapping[str, Any]:
    upper, lower = bounds(script.get(f"{OLD}_threshold"))
    if script.get(f"{OLD}_mode") != "mask":
        return _fields("truncate", script.get(f"{OLD}_level") or "token", upper, None)
    given = script.get(f"{OLD}_threshold_lower")
    lower = lower if given is None else number(given)
    return _fields("mask", script.get(f"{OLD}_level") or "token", upper, lower)


def _cap(script: Script) -> Mapping[str, Any]:
    return _fields("truncate", "token", number(script.get(CAP)), None)


def _rejection(script: Script) -> Mapping[str, Any]:
    level = REJECTIONS[script.get(f"{NEW}.rollout_rs")]
    given = script.get(f"{NEW}.rollout_rs_threshold")
    upper, lower = bounds(2.0 if given is None else given)
    if (given := script.get(f"{NEW}.rollout_rs_threshold_lower")) is not None:
        lower = number(given)
    return _fields("mask", level, upper, lower)


def _fields(kind: str, level: Any, upper: float, lower: float | None) -> Mapping[str, Any]:
    if level not in LEVELS:
        raise ValueError(f"the level must be one of {', '.join(LEVELS)}")
    if not upper >= 1 or (lower is not None and not 0 < lower <= 1):
        raise ValueError("the ratio 1 must lie within the thresholds")
    fields = {f"{FIELD}.kind": kind, f"{FIELD}.level": level, f"{FIELD}.upper": float(upper)}
    return fields if lower is None else fields | {f"{FIELD}.lower": float(lower)}


def _is_on(key: str, value: Any, script: Script) -> bool:
    if key == OLD:
        return value is True and script.get(f"{OLD}_threshold") is not None
    if key == CAP:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return isinstance(value, str) and value not in ("", "null", "None")


SWITCHES: dict[str, Callable[[Script], Mapping[str, Any]]] = {
    f"{NEW}.rollout_is": _weights,
    OLD: _old_weights,
    CAP: _cap,
    f"{NEW}.rollout_rs": _rejection,
}


def _chosen(script: Script) -> str | None:
    """The first that is on."""
    return next((key for key in SWITCHES if _is_on(key, script.get(key), script)), None)


def switch(value: Any, script: Script, key: str) -> Outcome:
    """A key that turns a correction on."""
    if not _is_on(key, value, script):
        return Outcome("taken over", "off")
    chosen = _chosen(script)
    if chosen is not None and chosen != key:
        return Outcome("not supported", ONE.format(chosen))
    is_rejection = key == f"{NEW}.rollout_rs"
    if is_rejection and value not in REJECTIONS:
        allowed = ", ".join(name for name in REJECTIONS if "k1" in name)
        return Outcome("not supported", f"{shown(value)}: only ratios bound here: {allowed}")
    fields = SWITCHES[key](script)
    if is_rejection:
        return Outcome("changed", KEPT_ARE_WEIGHED, fields)
    return Outcome("taken over", "", fields)


def option(value: Any, script: Script, key: str) -> Outcome:
    """A key that only says how."""
    chosen = _chosen(script)
    return Outcome("taken over", f"with {chosen}" if chosen else "no effect: no correction is on")
