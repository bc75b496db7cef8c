"""How sizes and names from files stand in messages."""

SHOWN = 5


def shown_size(num_bytes: float) -> str:
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("KB", 1e3, 1)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} bytes"


def shown_name(name: str) -> str:
    """As it is, or as a Python literal where a terminal would act on it."""
    return name if name.isprintable() else repr(name)


def shown_problems(**names_by_problem: list[str]) -> str:
    """A line for each problem that some have, which counts these and shows the first few."""
    lines = []
    for problem, names in names_by_problem.items():
        if names:
            shown = "; ".join(map(shown_name, names[:SHOWN]))
            lines.append(f"{len(names)} {problem}: {shown}{' ...' if len(names) > SHOWN else ''}")
    return "\n  ".join(["", *lines]) if lines else ""
