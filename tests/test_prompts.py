"""Prompts from real files and tasks, with a real byte tokenizer whose ids are known: 2 + byte."""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_opo.batch import Prompt
from megatron_opo.errors import CheckpointError, DataError, RecipeError
from megatron_opo.procedural import generate
from megatron_opo.prompts import (
    PromptCursor,
    PromptSet,
    check_tokenizer,
    hold_out,
    load_prompts,
    load_tokenizer,
    render,
)
from megatron_opo.recipe import DataConfig, DatasetConfig, ProceduralConfig
from megatron_opo.rows import Row, parse_row

BOS, EOS = 256, 257
TEMPLATE = (
    "<bos>{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(eos="<eos>", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Id n is byte n; 256 and 257 open and close every text that is encoded as it is."""
    # The byte-level alphabet stands a printable character for each byte, in this order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = {chr(b if b in plain else next(others)): b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab={**letters, "<bos>": BOS, "<eos>": EOS}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, chat_template=template
    )


TOKENIZER = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def jsonl(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, *rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def load(*files: str, tokenizer=TOKENIZER, split="train", data=None, **dataset) -> PromptSet:
    config = DatasetConfig(files=files, **dataset)
    return load_prompts(config, DataConfig(train=config, **(data or {})), tokenizer, split)


VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i} apples?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
        "answer": "a long solution that is not what is compared",
    }
    for i in range(3)
]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_verls_schema(write, tmp_path):
    prompts = load(write(tmp_path / f"t.{write.__name__}", *VERL_ROWS))
    assert prompts.summary() == "train: 3 prompts"
    text = "<bos>[user]2 apples?[assistant]"
    assert prompts.prompts[2] == Prompt(
        id="2",
        token_ids=(BOS, *ids("[user]2 apples?[assistant]")),
        text=text,
        data_source="openai/gsm8k",
        ground_truth="2",
        extra_info={"split": "train", "index": 2},
    )


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_plain_columns_and_dotted_keys(write, tmp_path):
    path = write(
        tmp_path / f"sums.{write.__name__}",
        {"q": {"text": "1+1"}, "a": 2, "a.b": "exact name"},
        {"q": {"text": "2+1"}, "a": 3, "a.b": "exact name"},
    )
    prompts = load(path, prompt_key="q.text", answer_key="a").prompts
    assert [(p.text, p.ground_truth) for p in prompts] == [
        ("<bos>[user]1+1[assistant]", 2),
        ("<bos>[user]2+1[assistant]", 3),
    ]
    assert {p.data_source for p in prompts} == {"sums"}
    assert load(path, prompt_key="q.text", answer_key="a.b").prompts[0].ground_truth == "exact name"


def test_an_answer_column_of_the_recipe_goes_before_verls(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", {**VERL_ROWS[0], "mine": "m"})
    assert load(path, answer_key="mine").prompts[0].ground_truth == "m"


def test_rows_count_over_files_and_limit_cuts_them(tmp_path):
    rows = [{"prompt": f"{i}", "answer": i} for i in range(5)]
    first, second = (
        jsonl(tmp_path / "a.jsonl", *rows[:2]),
        parquet(tmp_path / "b.parquet", *rows[2:]),
    )
    assert [(p.id, p.ground_truth) for p in load(first, second).prompts] == [
        (str(i), i) for i in range(5)
    ]
    assert [p.ground_truth for p in load(first, second, limit=3).prompts] == [0, 1, 2]


def test_messages_lose_the_nulls_that_parquet_adds(tmp_path):
    messages = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}]
    path = parquet(tmp_path / "t.parquet", {"prompt": messages, "answer": "a"})
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    (prompt,) = load(path, tokenizer=byte_tokenizer(template=template)).prompts
    assert prompt.text == "".join(json.dumps(m) for m in messages)


def test_system_prompt_and_plain_text(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", {"prompt": "2+2=", "answer": "4"})
    system = {"system_prompt": "Add."}
    assert load(path, data=system).prompts[0].text == "<bos>[system]Add.[user]2+2=[assistant]"
    plain = {"apply_chat_template": False}
    bare = byte_tokenizer(template=None)
    (prompt,) = load(path, tokenizer=bare, data={**plain, **system}).prompts
    assert prompt.text == "Add.\n\n2+2="
    # The tokenizer's own <bos> stays, its <eos> would end the response before it begins.
    assert prompt.token_ids == (BOS, *ids("Add.\n\n2+2="))


def test_overlong_prompts(tmp_path):
    overhead = len(ids("[user][assistant]")) + 1
    rows = [{"prompt": "x" * n, "answer": n} for n in (1, 5, 6, 5, 9)]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    data = {"max_prompt_tokens": overhead + 5}
    prompts = load(path, data=data, split="eval")
    assert [(p.id, p.ground_truth) for p in prompts.prompts] == [("0", 1), ("1", 5), ("3", 5)]
    assert prompts.summary() == (
        f"eval: 3 prompts (2 of 5 filtered: longer than {overhead + 5} tokens; "
        "1 repeat an earlier prompt)"
    )
    with pytest.raises(DataError) as caught:
        load(path, data={**data, "overlong_prompts": "error"})
    assert str(caught.value) == (
        f"{path} line 3: the prompt has {overhead + 6} tokens, data.max_prompt_tokens is "
        f"{overhead + 5} (2 of 5 rows are longer): raise data.max_prompt_tokens, or set "
        "data.overlong_prompts=filter"
    )
    with pytest.raises(DataError, match=r"line 1: .* \(5 of 5 rows are longer\).*no row is left"):
        load(path, data={"max_prompt_tokens": 3})


def test_summary_writes_large_numbers_readably():
    one = Prompt("0", (1,), "", "", "")
    prompts = PromptSet("train", (one,) * 9_988, 10_000, 12, 0, 512)
    assert prompts.summary() == (
        "train: 9,988 prompts (12 of 10,000 filtered: longer than 512 tokens)"
    )


GOOD = {"prompt": "q", "answer": "a"}
BAD_ROWS = [
    ({"question": "q", "answer": "a"}, "has no `prompt`; columns there: question, answer; name"),
    ({"prompt": None, "answer": "a"}, "`prompt` is null"),
    ({"prompt": "q", "solution": "a"}, "has no `answer`; columns there: prompt, solution; name "),
    ({"prompt": "q", "answer": None}, "`answer` is null; columns there: prompt, answer"),
    ({"prompt": "q", "reward_model": {"style": "rule"}}, "has no `answer`"),
    ({"prompt": 7, "answer": "a"}, "prompt must be text or a list of messages, got int 7"),
    ({"prompt": [], "answer": "a"}, "prompt must be text or a list of messages, got list []"),
    ({"prompt": " \n", "answer": "a"}, "prompt is empty"),
    ({"prompt": ["q"], "answer": "a"}, "prompt[0] must be a message object, got str 'q'"),
    ({"prompt": [{"content": "q"}], "answer": "a"}, "`role` as text, got keys ['content']"),
    ({"prompt": [{"role": "user"}], "answer": "a"}, "`content` as text, got keys ['role']"),
    ({"prompt": [{"role": "user", "content": 1}], "answer": 1}, "`content` as text, got int 1"),
    ({"prompt": [{"role": "user", "content": ""}], "answer": "a"}, "prompt is empty"),
    (
        {
            "prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "answer": "a",
        },
        "prompt ends with a message of the assistant",
    ),
    (
        {"prompt": [{"role": "critic", "content": "q"}], "answer": "a"},
        "chat template refuses the messages (roles: critic): TemplateError: no role critic",
    ),
    ({**GOOD, "data_source": 3}, "data_source must be text, got int 3"),
    ({**GOOD, "extra_info": "x"}, "extra_info must be an object, got str 'x'"),
    ({"prompt": "\ud800", "answer": "a"}, "is not valid Unicode: "),
    ([1, 2], "must be an object with columns, got list [1, 2]"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_with_file_and_line(row, message, tmp_path):
    path = jsonl(tmp_path / "t.jsonl", GOOD, row)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert message in str(caught.value)


def test_a_bad_parquet_row_is_named_from_0(tmp_path):
    path = parquet(tmp_path / "t.parquet", GOOD, {"prompt": None, "answer": "a"})
    with pytest.raises(DataError, match=r"t\.parquet row 1: `prompt` is null; columns there: "):
        load(path)
    when = datetime.datetime(2024, 1, 1)
    path = parquet(tmp_path / "u.parquet", {**GOOD, "extra_info": {"when": when}})
    with pytest.raises(DataError, match=r"row 0: extra_info must be JSON-like data: .*datetime"):
        load(path)


def test_two_system_prompts(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(tmp_path / "t.jsonl", {"prompt": messages, "answer": "a"})
    with pytest.raises(DataError, match="line 1: has a system message of its own"):
        load(path, data={"system_prompt": "mine"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "data.train.files: {path} does not exist"),
        ("rows.csv", b"prompt,answer\n", "ends in '.csv', must be one of: .parquet, .jsonl"),
        ("empty.jsonl", b"\n\n", "data.train.files: {path} has no rows"),
        ("cut.jsonl", b'{"prompt": "q", "answer": "a"}\n\n{"prompt', "{path} line 3: not valid JS"),
        ("latin.jsonl", b'{"prompt": "\xe4", "answer": 1}\n', "{path} line 1: not valid JSON"),
        ("deep.jsonl", b'{"prompt": ' + b"[" * 200_000, "{path} line 1: not valid JSON"),
        ("list.jsonl", b'[\n{"prompt": "q", "answer": "a"}\n]', "line 1: not valid JSON"),
        ("text.parquet", b"PAR1 but no", "{path}: cannot be read as parquet after 0 rows: "),
        ("none.parquet", b"", "{path}: cannot be read as parquet after 0 rows: "),
    ],
)
def test_a_bad_file(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(str(path))
    assert message.format(path=path) in str(caught.value)


def test_a_directory_and_an_empty_parquet(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DataError, match="is a directory, give the files in it"):
        load(str(tmp_path / "d.jsonl"))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="has no rows"):
        load(str(tmp_path / "e.parquet"))


def test_a_parquet_file_damaged_in_the_middle(tmp_path):
    path = tmp_path / "t.parquet"
    rows = [{"prompt": f"question {i} " + "x" * 200, "answer": str(i)} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", row_group_size=1000)
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 400] = bytes(400)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"cannot be read as parquet after \d+ rows"):
        load(str(path))


def test_no_chat_template(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", GOOD)
    with pytest.raises(DataError, match=r"no chat template: set data\.apply_chat_template=false"):
        load(path, tokenizer=byte_tokenizer(template=None))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
TEXT = st.text(st.characters(), max_size=20)  # lone surrogates too
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name"]), TEXT | JSON, max_size=3)
CHAT = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "tool", "\ud800"]), "content": TEXT}
    ),
    max_size=3,
)
RECORD = JSON | st.fixed_dictionaries(
    {},
    optional={
        "prompt": TEXT | CHAT | st.lists(MESSAGE, max_size=3) | JSON,
        "answer": JSON,
        "reward_model": st.fixed_dictionaries({"ground_truth": JSON}) | JSON,
        "data_source": TEXT | JSON,
        "extra_info": st.dictionaries(TEXT, JSON, max_size=2) | JSON,
    },
)
ANY = DatasetConfig(files=("x.jsonl",))


@given(RECORD, st.sampled_from([None, "Be brief."]), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_record_is_a_prompt_or_a_data_error(record, system_prompt, template):
    data = DataConfig(train=ANY, system_prompt=system_prompt, apply_chat_template=template)
    try:
        row = parse_row(record, "here", ANY, "train", "file")
        text = render(row, data, TOKENIZER)
    except DataError as error:
        assert str(error).startswith("here")
        str(error).encode()  # it can be printed
        return
    assert row.messages[-1]["content"] in text
    assert tuple(TOKENIZER(text, add_special_tokens=False).input_ids)
    assert isinstance(row.data_source, str)
    json.dumps([row.ground_truth, row.extra_info])


def test_the_file_reader_is_as_robust_as_the_row_parser(tmp_path):
    @given(st.binary(max_size=40) | RECORD.map(lambda record: json.dumps(record).encode()))
    @settings(max_examples=200, deadline=None)
    def read(line):
        path = tmp_path / "t.jsonl"
        path.write_bytes(line)
        try:
            assert len(load(str(path))) >= 1
        except DataError as error:
            assert str(path) in str(error)

    read()


# Procedural datasets.


def test_procedural_prompts_are_those_of_reasoning_gym():
    import reasoning_gym

    source = ProceduralConfig(task="chain_sum", size=4, seed=3, config={"max_digits": 1})
    dataset = DatasetConfig(procedural=source)
    prompts = load_prompts(dataset, DataConfig(train=dataset), TOKENIZER).prompts
    entries = list(reasoning_gym.create_dataset("chain_sum", size=4, seed=3, max_digits=1))
    for index, (prompt, entry) in enumerate(zip(prompts, entries, strict=True)):
        assert prompt.text == f"<bos>[user]{entry['question']}[assistant]"
        assert prompt.ground_truth == entry["answer"]
        assert prompt.data_source == "reasoning_gym/chain_sum"
        assert json.loads(json.dumps(prompt.extra_info)) == prompt.extra_info
        assert prompt.extra_info["index"] == index
    limited = DatasetConfig(procedural=source, limit=2)
    assert len(load_prompts(limited, DataConfig(train=limited), TOKENIZER)) == 2


def test_a_run_resumed_under_another_hash_seed_has_the_same_questions(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    before = generate("word_ladder", 3, 0, {})
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert generate("word_ladder", 3, 0, {}) == before


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chain_sun", {}, "data.eval.procedural.task: reasoning-gym has no task `chain_sun`; near"),
        ("chain_sum", {"digits": 1}, "options of chain_sum: allow_negation, max_digits, max_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"seed": 5}, "procedural.config: seed must be given beside `config`"),
        ("chain_sum", {"when": datetime.date(2024, 1, 1)}, "procedural.config: must be JSON-like"),
    ],
)
def test_a_procedural_task_that_does_not_exist_or_fit(task, config, message):
    dataset = DatasetConfig(procedural=ProceduralConfig(task=task, size=2, config=config))
    with pytest.raises(RecipeError) as caught:
        load_prompts(dataset, DataConfig(train=dataset), TOKENIZER, "eval")
    assert message in str(caught.value)


# The tokenizer.


def test_load_tokenizer_reads_what_was_saved(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("a\u00e4", add_special_tokens=False).input_ids == list("a\u00e4".encode())
    assert loaded.chat_template == TEMPLATE


def test_load_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.path: .*absent is not a directory"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(RecipeError, match=r"found: weights\.bin\); it needs tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_check_tokenizer_names_both_numbers():
    check_tokenizer(TOKENIZER, 258)
    check_tokenizer(TOKENIZER, 512)
    with pytest.raises(RecipeError, match=r"largest id is 257 .* vocab_size is 257 \(ids 0 to 256"):
        check_tokenizer(TOKENIZER, 257)
    with pytest.raises(RecipeError, match="no eos_token"):
        check_tokenizer(byte_tokenizer(eos=None), 258)


# The cursor.


def prompt_set(size: int, first: int = 0) -> PromptSet:
    prompts = tuple(Prompt(str(i), (first + i,), f"q{i}", "made", str(i)) for i in range(size))
    return PromptSet("train", prompts, size, 0, 0, 9)


@given(st.integers(1, 12), st.lists(st.integers(1, 30), max_size=8), st.booleans(), st.integers(0))
@settings(max_examples=200, deadline=None)
def test_every_epoch_covers_each_row_once_however_it_is_cut(size, cuts, shuffle, seed):
    prompts = prompt_set(size)
    cursor = PromptCursor(prompts, shuffle, seed)
    dealt = [p for n in cuts for p in cursor.next(n)]
    assert dealt == PromptCursor(prompts, shuffle, seed).next(sum(cuts))
    assert len({p.id for p in dealt}) == len(dealt)
    for start in range(0, len(dealt) - size + 1, size):
        epoch = dealt[start : start + size]
        rows = [int(p.ground_truth) for p in epoch]
        assert sorted(rows) == list(range(size))
        assert shuffle or rows == list(range(size))
        assert [p.id for p in epoch] == [f"e{start // size}-{row}" for row in rows]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_restored_cursor_continues_identically(size, before, after, shuffle, seed):
    cursor = PromptCursor(prompt_set(size), shuffle, seed)
    cursor.next(before)
    state = json.loads(json.dumps(cursor.state()))
    resumed = PromptCursor(prompt_set(size), shuffle, seed)
    resumed.next(3)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.next(after) == cursor.next(after)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 63)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_is_taken_back_comes_first_and_nothing_is_lost_or_dealt_twice(size, deals):
    """Each deal keeps some of its prompts (the bits of a number) and gives the others back."""
    cursor, kept, back = PromptCursor(prompt_set(size), True, 4), [], {}
    for count, bits in deals:
        resumed = PromptCursor(prompt_set(size), True, 4)
        resumed.restore(json.loads(json.dumps(cursor.state())))
        dealt = cursor.next(count)
        assert resumed.next(count) == dealt
        assert [p.id for p in dealt[: len(back)]] == list(back)[:count]
        assert [cursor.times_back(p) for p in dealt] == [back.get(p.id, 0) for p in dealt]
        kept += [p for i, p in enumerate(dealt) if bits >> i & 1]
        returned = [p for i, p in enumerate(dealt) if not bits >> i & 1]
        cursor.take_back(returned)
        rest = list(back)[count:]
        back = {p.id: back.get(p.id, 0) + 1 for p in returned} | {id: back[id] for id in rest}
    kept += cursor.next(len(back))
    fresh = PromptCursor(prompt_set(size), True, 4).next(len(kept))
    assert sorted(p.id for p in kept) == sorted(p.id for p in fresh)
    assert sorted(kept, key=str) == sorted(fresh, key=str)


def test_the_shuffle_differs_by_epoch_and_seed_and_never_changes():
    prompts = prompt_set(8)
    orders = {
        (seed, epoch): [int(p.ground_truth) for p in PromptCursor(prompts, True, seed).next(16)][
            8 * epoch : 8 * epoch + 8
        ]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    # Checkpoints hold an epoch and a position in it: a changed order would repeat and skip rows.
    assert orders[0, 0] == [7, 0, 1, 5, 3, 4, 2, 6]


def test_orders_are_uniform():
    """Each row is as often first as any other: chi-squared far below any suspicion."""
    size, seeds = 6, 3000
    prompts = prompt_set(size)
    first = [
        int(PromptCursor(prompts, True, seed).next(1)[0].ground_truth) for seed in range(seeds)
    ]
    expected = seeds / size
    assert sum((first.count(row) - expected) ** 2 / expected for row in range(size)) < 25.7


def test_a_state_of_other_prompts_is_refused():
    state = PromptCursor(prompt_set(5), True, 0).state()
    with pytest.raises(DataError, match=r"other prompts \(5 then, 6 now; fingerprint"):
        PromptCursor(prompt_set(6), True, 0).restore(state)
    with pytest.raises(DataError, match=r"other prompts \(5 then, 5 now; fingerprint"):
        PromptCursor(prompt_set(5, first=1), True, 0).restore(state)
    with pytest.raises(DataError, match="written with seed 0, this recipe has 1"):
        PromptCursor(prompt_set(5), True, 1).restore(state)
    with pytest.raises(DataError, match="written with shuffle True, this recipe has False"):
        PromptCursor(prompt_set(5), False, 0).restore(state)
    with pytest.raises(CheckpointError, match="lacks fingerprint, seed"):
        kept = {k: v for k, v in state.items() if k not in ("seed", "fingerprint")}
        PromptCursor(prompt_set(5), True, 0).restore(kept)


@pytest.mark.parametrize("field", ["token_ids", "data_source", "ground_truth", "extra_info"])
def test_the_fingerprint_sees_every_field_that_matters(field):
    from dataclasses import replace

    prompts = prompt_set(3)
    changed = {
        "token_ids": (9, 9),
        "data_source": "other",
        "ground_truth": "other",
        "extra_info": {"a": 1},
    }[field]
    last = replace(prompts.prompts[-1], **{field: changed})
    assert (
        replace(prompts, prompts=(*prompts.prompts[:-1], last)).fingerprint != prompts.fingerprint
    )


def test_row_is_what_its_docstring_shows():
    record = {"prompt": "2+2=", "answer": "4"}
    assert parse_row(record, "train.jsonl line 3", ANY, "train", "train") == Row(
        "train.jsonl line 3", ({"role": "user", "content": "2+2="},), "train", "4", {}
    )


def set_of(split: str, *ids: int) -> PromptSet:
    prompts = tuple(Prompt(str(i), (token,), "", "test", "") for i, token in enumerate(ids))
    return PromptSet(split, prompts, len(ids), 0, len(ids) - len(set(ids)), 8)


def test_training_leaves_out_what_the_evaluation_asks_and_says_so():
    kept = hold_out(set_of("train", 1, 2, 3, 3, 2), set_of("eval", 2, 9))
    assert [(p.id, p.token_ids) for p in kept.prompts] == [("0", (1,)), ("2", (3,)), ("3", (3,))]
    assert kept.summary() == (
        "train: 3 prompts (2 left out: they ask what the evaluation asks; "
        "1 repeat an earlier prompt)"
    )


def test_an_evaluation_of_all_training_prompts_is_refused():
    with pytest.raises(DataError, match=r"every one of the 2 .*data\.hold_out_eval=false"):
        hold_out(set_of("train", 1, 1), set_of("eval", 1))
