"""Findings as one screen of text; without colour where it is no terminal.

No package draws it: it must come out where packages are missing.
"""

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from megatron_opo.doctor.findings import Finding

COLOURS = {"ok": "\033[32m", "note": "\033[33m", "problem": "\033[1;31m"}
PLAIN = "\033[0m"
WORDS = {"ok": "ok", "note": "NOTE", "problem": "PROBLEM"}
NAME_WIDTH, WORD_WIDTH = 19, 8
LOG_WIDTH = 100


def print_findings(sections: Mapping[str, Sequence[Finding]], file: TextIO) -> None:
    is_terminal = file.isatty()
    colour = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = max(60, min(shutil.get_terminal_size((LOG_WIDTH, 0)).columns, 120))
    width = width if is_terminal else LOG_WIDTH
    for title, findings in sections.items():
        print(f"\n{title}" if title != next(iter(sections)) else title, file=file)
        for finding in findings:
            print(_lines(finding, width, colour), file=file)
    print(f"\n{verdict(sections)}", file=file)


def _lines(finding: Finding, width: int, colour: bool) -> str:
    word = WORDS[finding.status].ljust(WORD_WIDTH)
    if colour:
        word = f"{COLOURS[finding.status]}{word}{PLAIN}"
    indent = " " * (2 + WORD_WIDTH + NAME_WIDTH)
    room = width - len(indent)
    first, *more = textwrap.wrap(finding.found, room) or [""]
    text = [f"  {word}{finding.name.ljust(NAME_WIDTH - 1)} {first}"]
    text += [f"{indent}{line}" for line in more]
    if finding.what_to_do:
        lines = textwrap.wrap(finding.what_to_do, room - 3)
        text += [f"{indent}{'-> ' if i == 0 else '   '}{line}" for i, line in enumerate(lines)]
    return "\n".join(text)


def verdict(sections: Mapping[str, Sequence[Finding]]) -> str:
    statuses = [finding.status for findings in sections.values() for finding in findings]
    problems, notes = statuses.count("problem"), statuses.count("note")
    counts = f"{_counted(problems, 'problem')}, {_counted(notes, 'note')}"
    if problems:
        return f"{counts}: what is marked PROBLEM would fail"
    return f"{counts}: this machine is fit" + (", with the notes above" if notes else "")


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
