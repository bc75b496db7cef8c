"""`megatron-opo completion SHELL`: a script that lets the tab key complete the command."""

import argparse
from pathlib import Path

from megatron_opo.errors import UnfitEnvironmentError
from megatron_opo.recipe_file import field_paths

SHELLS = ("bash", "zsh")
FIELDS = "_megatron_opo_fields"
BASH_FIELDS = """\
{name}() {{
  compgen -S = -W "{fields}" -- "$1"
}}"""
# The generated function cannot say this itself: it asks for words in a subshell.
BASH_END = """
_megatron_opo() {
  _shtab_megatron_opo "$@"
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o filenames -F _megatron_opo megatron-opo"""
ZSH_FIELDS = """\
{name}() {{
  compadd -S = -- {fields}
}}"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What the shell has to read. `shell` is one of SHELLS.

    Commands and options are the parser's, its paths are files or (RUN) directories, and its
    overrides the fields of a recipe.

    Raises:
        UnfitEnvironmentError: shtab, which writes such scripts, is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise UnfitEnvironmentError(
            "shtab is not installed, but needed for completion (it writes the script): run "
            "`make setup`"
        ) from None
    for action in _actions(parser):
        if action.dest == "overrides":
            action.complete = dict.fromkeys(SHELLS, FIELDS)  # pyright: ignore
        elif action.type is Path:
            is_run = action.dest in ("directory", "directories")
            action.complete = shtab.DIRECTORY if is_run else shtab.FILE  # pyright: ignore
    of_fields, end = (BASH_FIELDS, BASH_END) if shell == "bash" else (ZSH_FIELDS, "")
    preamble = of_fields.format(name=FIELDS, fields=" ".join(_values()))
    text = shtab.complete(parser, shell, preamble={shell: preamble})  # pyright: ignore
    return text + end


def _values() -> list[str]:
    """The fields of a recipe that hold a value, not further fields."""
    paths = field_paths()
    return [p for p in paths if not any(other.startswith(f"{p}.") for other in paths)]


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those of the parser and of all commands below it."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                found += _actions(command)
    return found
