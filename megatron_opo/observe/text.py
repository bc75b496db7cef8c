"""Numbers and times as people say them, and the lines of a step."""

import math

# (heading, metric, width): what one line about a step shows.
COLUMNS = (
    ("reward", "critic/rewards/mean", 8),
    ("length", "response_length/mean", 8),
    ("entropy", "actor/entropy", 8),
    ("logp gap", "on_policy/logprob_gap_max", 10),
    ("generate", "timing_s/generate", 9),
    ("score", "timing_s/reward", 7),
    ("update", "timing_s/update", 7),
    ("sync", "timing_s/sync", 7),
)
STEP_WIDTH = 5
LEFT_WIDTH = 9


def duration(seconds: float) -> str:
    """Seconds as a person would say them: 40ms, 4.2s, 3m20s, 2h05m, 1d03h."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms" if seconds >= 0.0005 else "<1ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s" if seconds else "0s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def clock(seconds: float) -> str:
    """Of something that is shown again and again: whole seconds, 0:07, 12:03, 2:05:09."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def number(value: float | None) -> str:
    """A metric in at most 8 characters; "-" when there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.1e}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def amount(count: float) -> str:
    """Of parameters: 789,888 is 0.79M, 7,615,616,512 is 7.6B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.1 * size and (unit != "k" or count >= size):
            return f"{count / size:.{2 if count < size else 1 if count < 100 * size else 0}f}{unit}"
    return f"{count:.0f}"


def header_line() -> str:
    cells = "".join(f"{heading:>{width}}" for heading, _, width in COLUMNS)
    return f"{'step':>{STEP_WIDTH}}{cells}{'left':>{LEFT_WIDTH}}"


def step_line(step: int, metrics: dict[str, float], seconds_left: float | None) -> str:
    """One step under `header_line()`."""
    cells = ""
    for _, name, width in COLUMNS:
        value = metrics.get(name)
        if value is not None and name.startswith("timing_s/"):
            cells += f"{duration(value):>{width}}"
        else:
            cells += f"{number(value):>{width}}"
    left = "-" if seconds_left is None else duration(seconds_left)
    return f"{step:>{STEP_WIDTH}}{cells}{left:>{LEFT_WIDTH}}"


def summary_text(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns: a label and its value."""
    width = max((len(label) for label, _ in rows), default=0)
    indent = "\n" + " " * (width + 4)
    return "\n".join(
        f"  {label:<{width}}  {indent.join(value.splitlines() or [''])}" for label, value in rows
    )
