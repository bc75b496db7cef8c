"""Secrets in a recipe (a token in rollout.server_env, a judge's key in reward.kwargs) reach the
processes that need them, but no file, log or report."""

import re
from typing import Any

HIDDEN = "(hidden)"
# The key that servers want of their clients.
API_KEY_VARIABLE = "MEGATRON_OPO_API_KEY"
# A number called so is a count, not a secret: max_response_tokens.
_COUNT = re.compile(r"tokens?$", re.IGNORECASE)
_SECRET = re.compile(
    r"((api|access|secret|private|auth|openai|anthropic|judge)[_-]?key|token|secret|passphrase|"
    r"passw(or)?d|(^|_)pass|credential)s?([_-]?\d+)?$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether what has this name is taken for a secret: HF_TOKEN, api_key, db_password."""
    return bool(_SECRET.search(name))


def hide_secrets(tree: Any) -> Any:
    """The same nested dicts and lists, with HIDDEN in the place of what is under such a name."""
    if isinstance(tree, dict):
        return {
            name: HIDDEN if _hides(str(name), value) else hide_secrets(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [hide_secrets(value) for value in tree]
    return tree


def _hides(name: str, value: Any) -> bool:
    is_count = isinstance(value, int | float) and _COUNT.search(name)
    return value is not None and not is_count and is_secret(name)


def hidden_fields(tree: Any, prefix: str = "") -> list[str]:
    """Names of the fields that hold HIDDEN, like "reward.kwargs.api_key"."""
    if isinstance(tree, dict):
        return [
            field
            for name, value in tree.items()
            for field in hidden_fields(value, f"{prefix}.{name}" if prefix else str(name))
        ]
    return [prefix] if tree == HIDDEN else []
