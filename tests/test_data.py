"""What `megatron-opo data` counts is counted here by hand, in files that were written for it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.cli import main
from megatron_opo.data.convert import write_rows
from megatron_opo.data.survey import survey
from megatron_opo.errors import DataError
from megatron_opo.recipe import DataConfig, DatasetConfig
from megatron_opo.rows import Row, read_rows
from tests.models import character_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
name: x
model: {path: MODEL}
data:
  train: {files: [train.jsonl]}
  eval: {files: [eval.jsonl]}
  apply_chat_template: false
  max_prompt_tokens: 8
"""


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ask(*words: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *words])
    return ended.value.code, *capsys.readouterr()


def row(prompt: str, answer: object = "4", **columns: object) -> dict:
    return {"prompt": prompt, "answer": answer, **columns}


def test_rows_that_cannot_be_used_are_counted_and_named(tmp_path, capsys):
    rows = [row("2+2="), {"prompt": "1+1="}, row("3+3=", None), row(" "), row("1+3=", "")]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    code, out, _ = ask(file, "--json", capsys=capsys)
    (found,) = json.loads(out)["datasets"]
    assert code == 1
    assert (found["rows"], found["usable"], found["empty_answers"]) == (5, 2, 1)
    for line, error in zip((2, 3, 4), found["unusable"], strict=True):
        assert error.startswith(f"{file} line {line}: ")
    code, out, _ = ask(file, capsys=capsys)
    assert "5 rows, 2 can be used" in out and out.count("UNUSABLE") == 3


def test_a_file_that_is_damaged_counts_up_to_there(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"prompt": "2+2=", "answer": "4"}\n{"prompt"\n{"prompt": "1", "answer": "1"}\n'
    )
    code, out, _ = ask(str(file), "--json", capsys=capsys)
    (found,) = json.loads(out)["datasets"]
    assert (code, found["usable"]) == (1, 1)
    assert "line 2: not valid JSON" in found["unusable"][0]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    character_tokenizer().save_pretrained("model")
    Path("recipe.yaml").write_text(RECIPE.replace("MODEL", "model"))
    train = [row("1+1=", "2"), row("1+2=", "3"), row("1+1=", "2"), row("1+2=", "12")]
    jsonl(Path("train.jsonl"), *train, row("123+456=", "579", data_source="long"))
    jsonl(Path("eval.jsonl"), row("1+2=", "3"), row("5+5=", "10"))
    return "recipe.yaml"


def test_a_recipe_s_data(recipe, capsys):
    code, out, _ = ask(recipe, "--json", capsys=capsys)
    answer = json.loads(out)
    train, evaluation = answer["datasets"]
    assert code == 0
    assert (train["rows"], train["repeated"], train["contradicting"]) == (5, 2, 1)
    assert train["sources"] == {"train": 4, "long": 1}
    # A token for each character, and nothing around them.
    assert train["lengths"] == {"p0": 4, "p50": 4, "p90": 8, "p99": 8, "p100": 8}
    assert (train["unit"], train["overlong"], evaluation["rows"]) == ("tokens", 0, 2)
    assert answer["overlap"] == 1
    code, out, _ = ask(recipe, "data.max_prompt_tokens=5", capsys=capsys)
    assert "1 exceed data.max_prompt_tokens (5): filtered" in out
    assert "questions that stand in both: 1, left out of training" in out
    assert "2 rows with the question of an earlier one; with another answer: 1" in out


def test_without_the_model_lengths_are_in_characters(recipe, capsys):
    code, out, _ = ask(recipe, "--split", "eval", "model.path=elsewhere", capsys=capsys)
    assert code == 0
    assert "eval: 2 rows" in out and "train" not in out
    assert "4 to 4 characters" in out


def test_a_chat_template_that_is_not_there(recipe, capsys):
    Path("model/chat_template.jinja").unlink()
    code, _, error = ask(recipe, "data.apply_chat_template=true", capsys=capsys)
    assert code == 2 and "has no chat template" in error


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversion_keeps_what_a_row_says(kind, recipe, capsys):
    out = f"out.{kind}"
    code, _, error = ask(recipe, "--split", "train", "--out", out, capsys=capsys)
    assert (code, error) == (0, f"wrote 5 rows to {out}\n")
    before = read_rows(DatasetConfig(files=("train.jsonl",)), "train")
    after = read_rows(DatasetConfig(files=(out,)), "train")
    for one, other in zip(before, after, strict=True):
        assert one.messages == other.messages and one.data_source == other.data_source
        assert one.ground_truth == other.ground_truth
    code, _, error = ask(recipe, "--split", "train", "--out", out, capsys=capsys)
    assert code == 2 and "exists already" in error
    assert [p for p in os.listdir() if "partial" in p] == []


def test_the_columns_are_verl_s(recipe, capsys):
    ask("train.jsonl", "--out", "out.parquet", capsys=capsys)
    (first, *_) = pyarrow.parquet.read_table("out.parquet").to_pylist()
    assert first == {
        "data_source": "train",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }


def test_answers_of_two_types_are_refused_by_parquet_only(tmp_path, capsys):
    file = jsonl(tmp_path / "a.jsonl", row("1+1=", "2"), row("which?", {"a": 1}))
    code, _, error = ask(file, "--out", str(tmp_path / "b.parquet"), capsys=capsys)
    assert code == 2 and "write .jsonl instead" in error
    assert not (tmp_path / "b.parquet").exists()
    code, *_ = ask(file, "--out", str(tmp_path / "b.jsonl"), capsys=capsys)
    assert code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe.yaml", "--out", "x.jsonl"], "add --split"),
        (["recipe.yaml", "--model", "model"], "model.path=DIR"),
        (["train.jsonl", "--split", "eval"], "is for recipes"),
        (["none.jsonl"], "does not exist"),
        (["train.csv"], "must be one of: .parquet, .jsonl"),
        (["train.jsonl", "--out", "x.csv"], "must be one of: .jsonl, .parquet"),
        (["train.jsonl", "--out", "no/x.jsonl"], "cannot be written"),
    ],
)
def test_mistakes(words, message, recipe, capsys):
    code, _, error = ask(*words, capsys=capsys)
    assert code == 2 and message in error


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ROWS = st.builds(
    lambda content, source, truth, extra: Row(
        "here", ({"role": "user", "content": f"q{content}"},), source, truth, extra
    ),
    TEXTS,
    TEXTS,
    VALUES.filter(lambda value: value is not None),
    st.dictionaries(TEXTS, VALUES, max_size=2),
)


@settings(max_examples=30)
@given(st.lists(ROWS, min_size=1, max_size=4), st.sampled_from([".jsonl", ".parquet"]))
def test_what_is_written_is_what_was_there_or_an_error(tmp_path_factory, rows, kind):
    file = tmp_path_factory.mktemp("out") / f"x{kind}"
    try:
        assert write_rows(iter(rows), file) == len(rows)
    except DataError:
        assert kind == ".parquet" and not file.exists()
        return
    read = list(read_rows(DatasetConfig(files=(str(file),)), "train"))
    assert [r.ground_truth for r in read] == [r.ground_truth for r in rows]
    assert [r.messages for r in read] == [r.messages for r in rows]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy")), min_size=1))
def test_counts_against_a_plain_count(tmp_path_factory, pairs):
    rows = [row(prompt * (1 + ord(prompt) % 5), answer) for prompt, answer in pairs]
    file = jsonl(tmp_path_factory.mktemp("in") / "x.jsonl", *rows)
    dataset = DatasetConfig(files=(file,))
    found = survey(dataset, DataConfig(train=dataset), None, "train", examples=0)
    counts = Counter(prompt for prompt, _ in pairs)
    firsts = dict(reversed(pairs))
    assert found.repeated == sum(count - 1 for count in counts.values())
    assert found.contradicting == sum(firsts[prompt] != answer for prompt, answer in pairs)
    lengths = sorted(len(r["prompt"]) for r in rows)
    assert found.lengths == tuple(lengths)
    for percent in (0, 50, 90, 100):
        least = found.percentile(percent)
        assert sum(length <= least for length in lengths) >= percent / 100 * len(lengths)
        assert least == lengths[0] or (
            sum(length < least for length in lengths) < percent / 100 * len(lengths)
        )


def test_the_command_in_a_process_of_its_own(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", row("2+2="))
    command = [sys.executable, "-m", "megatron_opo", "data", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "train: 1 row, 1 can be used" in done.stdout
