"""The samples of a run as its report shows them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_opo.observe.samples import list_samples, read_samples

# Characters kept of a longer text: its beginning, and its end, where answers stand.
HEAD, TAIL = 4000, 2000
# C0 controls and DEL would vanish or garble the page: show their Unicode pictures instead. Those
# that turn the direction of text around would hide what it says: one picture for all.
VISIBLE_CONTROLS = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0x2426)
)
# Bytes of JSON that the browser of samples may add to a page, over all of its runs. One file may
# take this share of it, so that others have room.
BROWSER_BYTES = 6_000_000
SHARE_OF_FILE = 1 / 8
# A name in the samples file, what the page calls it, and the value with half of the full colour.
TOKEN_VALUES = (
    ("token_logprobs", "logprob", 1.5),
    ("token_entropies", "entropy", 1.0),
    ("token_gaps", "gap", 1e-4),
)
# A value takes one character of a page: a share of the full colour, or "." for none.
LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def eval_comparisons(run_path: Path) -> dict[str, Any] | None:
    """The first response to held-out prompts in the first and in the last evaluation: the three
    whose reward rose most, and the one that rose least or fell, so that a loss is not hidden.
    """
    evaluations = list_samples(run_path, "eval")
    if len(evaluations) < 2:
        return None
    (first_step, first_path), (last_step, last_path) = evaluations[0], evaluations[-1]
    earlier = {group[0].get("prompt"): group for group in read_samples(first_path)}
    pairs = []
    for late in read_samples(last_path):
        early = earlier.get(late[0].get("prompt"))
        if early is not None:
            pairs.append((early, late))
    pairs.sort(key=lambda pair: (_rise(pair[0][:1], pair[1][:1]), _rise(*pair)), reverse=True)
    rows = [
        {
            "prompt": shown(early[0].get("prompt")),
            "truth": shown(early[0].get("ground_truth")),
            "change": f"{_mean_reward(early):.3g} \u2192 {_mean_reward(late):.3g}",
            "samples": len(late),
            "cards": [
                {"title": f"before, step {first_step}", **_card(early[0])},
                {"title": f"after, step {last_step}", **_card(late[0])},
            ],
        }
        for early, late in [*pairs[:3], *pairs[3:][-1:]]
    ]
    return {"first": first_step, "last": last_step, "rows": rows} if rows else None


def extremes(run_path: Path) -> list[dict[str, Any]]:
    """Of the first and the last step, the best and the worst response that were kept."""
    kept = list_samples(run_path, "train")
    rows = []
    for step, path in dict.fromkeys([*kept[:1], *kept[-1:]]):
        scored = [r for group in read_samples(path) for r in group if r.get("reward") is not None]
        if not scored:
            continue
        # Between equal rewards the advantage tells how far from its group a response was.
        order = sorted(scored, key=lambda r: (r["reward"], r.get("advantage") or 0.0))
        worst, best = order[0], order[-1]
        cards = [{"title": "best", **_card(best)}, {"title": "worst", **_card(worst)}]
        rows.append({"step": step, "cards": cards})
    return rows


def _rise(early: list[dict[str, Any]], late: list[dict[str, Any]]) -> float:
    return _mean_reward(late) - _mean_reward(early)


def _mean_reward(group: list[dict[str, Any]]) -> float:
    return sum(record.get("reward") or 0.0 for record in group) / len(group)


def _card(record: dict[str, Any]) -> dict[str, Any]:
    reward, advantage = record.get("reward"), record.get("advantage")
    return {
        "step": record.get("step"),
        "prompt": shown(record.get("prompt")),
        "parts": _parts(member_of(record)),
        "truth": shown(record.get("ground_truth")),
        "reward": "unscorable" if reward is None else f"{reward:.3g}",
        "tone": "none" if reward is None else "good" if reward > 0 else "bad",
        "advantage": None if advantage is None else f"{advantage or 0:+.3g}",
        "length": record.get("length"),
        "cut": record.get("finish_reason") == "length",
        "error": shown(record.get("reward_error")) if record.get("reward_error") else None,
    }


def shown(value: Any) -> str:
    """Text from a data set or a model, at a bearable length; who shows it has to escape it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]}{_left_out(len(text))}{text[-TAIL:]}"
    return text.translate(VISIBLE_CONTROLS)


def _left_out(length: int) -> str:
    return f"\n[... {length - HEAD - TAIL:,} characters left out ...]\n"


def _parts(member: dict[str, Any]) -> list[tuple[str, bool]]:
    """The shown response as pieces, each with whether it was added to what the policy said."""
    text = member["text"]
    parts, end = [], 0
    for start, stop in member.get("added", ()):
        parts += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    return [part for part in [*parts, (text[end:], False)] if part[0]]


def browser_data(runs: list[tuple[str, Path]], budget: int = BROWSER_BYTES) -> dict[str, Any]:
    """What the page's script lets one look through, of (name, directory) of each run.

    `groups`: run (its place), kind, step, prompt, truth, members. As many files as the budget of
    bytes holds are read: from the first and the last of a run to those between, so that what is
    left out is spread evenly; of a large file the first groups, of a large group the first members
    (`of` then says how many it has). `files`, `files_shown` and `files_cut`, those that are not
    there in full, say how many there are.
    """
    groups, files, files_shown, files_cut = [], 0, 0, 0
    for place, (_, run_path) in enumerate(runs):
        kept = [(step, "eval", path) for step, path in list_samples(run_path, "eval")]
        kept += [(step, "train", path) for step, path in list_samples(run_path, "train")]
        files += len(kept)
        budget_of_run = left = budget // len(runs)
        for step, kind, path in _spread(sorted(kept)):
            of_file = [_group(place, kind, step, records) for records in read_samples(path)]
            fitting, size = _fitting(of_file, min(left, int(budget_of_run * SHARE_OF_FILE)))
            if size > left:
                break
            left -= size
            files_shown += 1
            files_cut += fitting != of_file
            groups += fitting
    groups.sort(key=lambda group: (group["run"], group["step"], group["kind"]))
    names = [shown(name) for name, _ in runs]
    halves = {name: half for _, name, half in TOKEN_VALUES}
    return {
        "runs": names,
        "levels": LEVELS,
        "halves": halves,
        "groups": groups,
        "files": files,
        "files_shown": files_shown,
        "files_cut": files_cut,
    }


def _fitting(groups: list[dict[str, Any]], limit: int) -> tuple[list[dict[str, Any]], int]:
    """The first groups that take no more bytes of JSON than the limit, and how many they take; at
    least one response."""
    total = 0
    for i, group in enumerate(groups):
        size = len(json.dumps(group))
        if total + size > limit:
            return (groups[:i], total) if i else _fitting_members(group, limit)
        total += size
    return groups, total


def _fitting_members(group: dict[str, Any], limit: int) -> tuple[list[dict[str, Any]], int]:
    members = group["members"]
    total = len(json.dumps({**group, "members": []}))
    for count, member in enumerate(members):
        size = len(json.dumps(member))
        if count and total + size > limit:
            return [{**group, "members": members[:count], "of": len(members)}], total
        total += size
    return [group], total


def _spread(items: list) -> Iterator:
    """The first, the last, the middle one, then those between these, and so on."""
    last = len(items) - 1
    seen = set()
    pieces = 1
    while len(seen) < len(items):
        for i in range(pieces + 1):
            index = round(last * i / pieces)
            if index not in seen:
                seen.add(index)
                yield items[index]
        pieces *= 2


def _group(place: int, kind: str, step: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    first = records[0]
    return {
        "run": place,
        "kind": kind,
        "step": step,
        "prompt": shown(first.get("prompt")),
        "truth": shown(first.get("ground_truth")),
        "members": [member_of(record) for record in records],
    }


def member_of(record: dict[str, Any]) -> dict[str, Any]:
    names = ("reward", "advantage", "baseline", "length", "index")
    member = {name: record[name] for name in names if record.get(name) is not None}
    text = record.get("response")
    member["text"] = shown(text)
    if record.get("finish_reason") == "length":
        member["cut"] = True
    if record.get("reward_error"):
        member["error"] = shown(record["reward_error"])
    if isinstance(text, str) and (added := _shown_ranges(record.get("added"), len(text))):
        member["added"] = added
    chars = record.get("token_chars")
    if isinstance(text, str) and isinstance(chars, list) and sum(chars) == len(text):
        member |= _tokens(record, len(text))
    return member


def _shown_ranges(ranges: Any, length: int) -> list[list[int]]:
    """Where the ranges of a text of that length are when it is `shown`."""
    if not isinstance(ranges, list) or length <= HEAD + TAIL:
        return ranges or []
    tail = length - TAIL
    shift = tail - HEAD - len(_left_out(length))
    found = []
    for start, end in ranges:
        first = start if start < HEAD else max(start, tail) - shift
        last = end if end <= HEAD else end - shift if end > tail else HEAD
        if first < last:
            found.append([first, last])
    return found


def _tokens(record: dict[str, Any], length: int) -> dict[str, Any]:
    """Pieces of the shown text: `chars`, how long each is, and a string of levels, one for each
    piece, of every value there is. What is cut out of a long text is one piece without any."""
    chars = record["token_chars"]
    values = {
        name: "".join(_level(value, half) for value in record[key])
        for key, name, half in TOKEN_VALUES
        if isinstance(record.get(key), list) and len(record[key]) == len(chars)
    }
    if length <= HEAD + TAIL:
        return {"chars": chars, **values}
    sizes: list[int] = []
    kept: list[int | None] = []  # the token that a piece is of
    end, marked = 0, False
    for token, size in enumerate(chars):
        start, end = end, end + size
        in_head = min(end, HEAD) - min(start, HEAD)
        in_tail = max(end, length - TAIL) - max(start, length - TAIL)
        if end > HEAD and not marked:
            marked = True
            sizes += [in_head, len(_left_out(length)), in_tail]
            kept += [token, None, token]
        elif in_head or in_tail or not size:
            sizes.append(in_head or in_tail)
            kept.append(token)
    spread = {
        name: "".join("." if token is None else of_tokens[token] for token in kept)
        for name, of_tokens in values.items()
    }
    return {"chars": sizes, **spread}


def _level(value: float | None, half: float) -> str:
    if value is None:
        return "."
    return LEVELS[int(len(LEVELS) * abs(value) / (abs(value) + half))]
