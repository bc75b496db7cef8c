"""Secrets in a recipe (a token in rollout.server_env, a judge's key in reward.kwargs) reach the
processes that need them, but no file, log or report."""

import re
from typing import Any

HIDDEN = "(hidden)"
# The key that servers want of their clients.
API_KEY_VARIABLE = "MEGATRON_OPO_API_KEY"
_SECRET = re.compile(
    r"((api|access|secret|private|auth)[_-]?key|token|secret|passw(or)?d|"
    r"credentials?)$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether what has this name is taken for a secret: HF_TOKEN, api_key, db_password."""
    return bool(_SECRET.search(name))


def hide_secrets(tree: Any) -> Any:
    """The same nested dicts and lists, with HIDDEN in the place of each text under such a name."""
    if isinstance(tree, dict):
        return {
            name: HIDDEN if isinstance(value, str) and is_secret(str(name)) else hide_secrets(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [hide_secrets(value) for value in tree]
    return tree


def hidden_fields(tree: Any, prefix: str = "") -> list[str]:
    """Names of the fields that hold HIDDEN, like "reward.kwargs.api_key"."""
    if isinstance(tree, dict):
        return [
            field
            for name, value in tree.items()
            for field in hidden_fields(value, f"{prefix}.{name}" if prefix else str(name))
        ]
    return [prefix] if tree == HIDDEN else []
