"""The tables of docs/from_verl.md: `python -m megatron_opo.import_verl.page` prints them."""

from megatron_opo.import_verl.rules import shown
from megatron_opo.import_verl.table import ALIASES, DEFAULTS, RULES

# Rules of one group stand in one table, under the longest of these that their keys begin with.
GROUPS = (
    "data",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "custom_reward_function",
    "reward_model",
    "algorithm",
    "trainer",
)
OTHERS = "Others"


def _group(key: str) -> str:
    found = [name for name in GROUPS if key.startswith(f"{name}.")]
    return max(found, key=len, default=OTHERS)


def tables() -> str:
    """Markdown: every rule, every other name of a key, and verl's defaults that are counted."""
    lines: list[str] = []
    for group in (*GROUPS, OTHERS):
        lines += [f"### {group}", "", "| verl | here | |", "| --- | --- | --- |"]
        for rule in RULES:
            if _group(rule.key) == group:
                name = rule.key if group == OTHERS else rule.key[len(group) + 1 :]
                lines.append(f"| `{name}` | {rule.becomes} | {rule.note} |")
        lines.append("")
    lines += ["### Other names that verl has or had", "", "| name | read as |", "| --- | --- |"]
    lines += [f"| `{name}` | `{other}` |" for name, other in ALIASES.items()]
    lines += ["", "### Defaults of verl", "", "| key, if not given | counts as |", "| --- | --- |"]
    lines += [f"| `{key}` | {shown(value)} |" for key, value in DEFAULTS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
