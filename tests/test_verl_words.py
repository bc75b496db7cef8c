"""Scripts are read as bash reads them, and values as Hydra writes them."""

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl_cases import ANY_TEXT, ENVIRONMENT, PLAIN, SCRIPTS

from megatron_opo.import_verl.shell import read_script
from megatron_opo.import_verl.values import parse_value


def words_by_bash(script: str) -> list[str]:
    """What bash itself hands to python3, after the trainer's name."""
    program = (
        "show() { while (( $# )) && [[ $1 != verl.trainer.main_ppo ]]; do shift; done; shift; "
        'printf \'%s\\0\' "$@"; }; python3() { show "$@"; }; ray() { show "$@"; }\n'
    )
    quiet = script.replace("set -x", "set -").replace("2>&1 | tee run.log", "")
    ran = subprocess.run(
        ["bash", "-c", program + quiet], env=ENVIRONMENT, capture_output=True, text=True
    )
    return ran.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", ["opo.sh", "grpo_four_updates.sh"])
def test_a_script_is_read_as_bash_reads_it(name):
    script = (SCRIPTS / name).read_text()
    assert list(read_script(script, ENVIRONMENT).words) == words_by_bash(script) != []


def test_arrays_and_arithmetic_are_read_as_bash_reads_them():
    script = "TRAIN_FILE=t.parquet\n" + (SCRIPTS / "dapo_moe_megatron.sh").read_text()
    assert list(read_script(script, ENVIRONMENT).words) == words_by_bash(script) != []


EXPANSIONS = """
A=1; B="two words"; E= ; L=(x "y z"); L+=(w) ; C=${A:-9}${U:-8}${E:-7}${E-6}${A:+5}${U+4}
python3 -m verl.trainer.main_ppo a=$A b=$B c="$B" d='$B' e=\\$A f=$C g="${L[@]}" h=${L[@]} \\
  i=$((A + 2 * (3 - 7) / 3 % 5)) j=$(( -7 / 2 ))x k="q\\"r\\\\s" l=a\\ b m=${A}2 n="" "" \\
  o=$((2**10)) p="${U:-$B}" q=x#y # r=1
"""


def test_expansions_are_those_of_bash():
    assert list(read_script(EXPANSIONS, {}).words) == [w for w in words_by_bash(EXPANSIONS) if w]


@given(st.lists(ANY_TEXT.filter(bool)))
def test_quoted_words_come_back_as_they_were(words):
    line = "python3 -m verl.trainer.main_ppo " + " ".join(map(shlex.quote, words))
    assert list(read_script(line, {}).words) == words


PIECES = [
    *"=.#,:",
    " ",
    "\\ ",
    "\\'",
    "\\$",
    "\\\n",
    "''",
    '""',
    "'x  $X'",
    '"a\\"b\\\\"',
    '"\\$X\\a"',
]
PIECES += [
    "$X",
    "${X}",
    '"$X"',
    '"p${X}q"',
    "${U:-d e}",
    '"${U:-$X}"',
    "${X:+y}",
    "${E:-z}",
    "${E-z}",
]
PIECES += [
    '"${L[@]}"',
    "${L[@]}",
    '"<${L[@]}>"',
    "$((N*2+1))",
    "$((-N/2))",
    '"$((N%4))"',
    "${L}",
    "$N",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_words_are_read_as_bash_reads_them(words):
    script = f"X='1  2'; E=; N=7; L=(u 'v w' '')\npython3 -m verl.trainer.main_ppo k{words}\n"
    assert list(read_script(script, {}).words) == [w for w in words_by_bash(script) if w]


def test_what_only_a_run_could_tell_is_said():
    command = read_script(
        "if [ -z $D ]; then N=2; fi; N=${N:-1}\nmain_ppo a.b=$N c.d=$FILES e.f=$(date +%s)\n", {}
    )
    assert command.words == ("a.b=1", "c.d=$FILES", "e.f=$(date +%s)")
    assert [note.split("`")[1] for note in command.notes] == ["$FILES", "$(date +%s)", "N"]


def hydra_text(value) -> str:
    """As Hydra's grammar writes it, with all text in quotes."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ", ".join(map(hydra_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{hydra_text(k)}: {hydra_text(v)}" for k, v in value.items()) + "}"
    return "null" if value is None else str(value)


NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3)
)


@given(NESTED)
def test_values_come_back_as_they_were(value):
    assert parse_value(hydra_text(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("True", True),
        ("0.", 0.0),
        ("['console','wandb']", ["console", "wandb"]),
        ('["a", b c]', ["a", "b c"]),
        ("{a:1,b:[x]}", {"a": 1, "b": ["x"]}),
        ("/data/a b.parquet", "/data/a b.parquet"),
        ("[${data.x}, 2]", ["${data.x}", 2]),
        ("[1", "[1"),
        ("", ""),
    ],
)
def test_unquoted_values(text, value):
    assert parse_value(text) == value
