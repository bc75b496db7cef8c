"""What the tools make is what transformers, the recipes and the server can use."""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_opo.model_fit import check_model
from megatron_opo.recipe_file import load_recipe
from megatron_opo.rewards.verifiers import exact

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tiny = load_tool("make_tiny_model")
smollm2 = load_tool("make_smollm2")


def run_main(tool, *arguments: str) -> None:
    """As from the command line, in this process: importing transformers takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [tool.__name__, *arguments])
        threads = torch.get_num_threads()
        try:
            tool.main()
        finally:
            torch.set_num_threads(threads)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    run_main(tiny, "--out", str(out), "--steps", "3", "--size", "64")
    return out


def test_recipes_exist():
    assert {"quickstart_cpu", "smollm2_135m_cpu", "opo_7b"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem


def test_quickstart_recipe_fits_the_tiny_model(tiny_directory):
    """Sizes, lengths, and the verifier on the tool's own answers."""
    overrides = (f"model.path={tiny_directory}", "actor.tensor_parallel=2")
    recipe = load_recipe(
        ROOT / "recipes/quickstart_cpu.yaml", (*overrides, "actor.pipeline_parallel=2")
    )
    check_model(recipe)
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    longest = tiny.Problem(999, 999)
    assert len(tokenizer(longest.prompt)["input_ids"]) <= recipe.data.max_prompt_tokens
    answer = tiny.careful_answer(longest)
    assert len(tokenizer(answer)["input_ids"]) + 1 <= recipe.rollout.max_response_tokens
    assert recipe.reward.function == "exact"
    assert exact("", answer, longest.answer, {}, **recipe.reward.kwargs) == 1.0
    assert exact("", tiny.hasty_answer(longest), longest.answer, {}, **recipe.reward.kwargs) == 0.0
    assert exact("", answer + ",", longest.answer, {}, **recipe.reward.kwargs) == 0.0


def test_tiny_model_is_a_hugging_face_directory(tiny_directory):
    config = AutoConfig.from_pretrained(tiny_directory)
    model = AutoModelForCausalLM.from_pretrained(tiny_directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    assert config.model_type == "qwen3"
    assert config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tokenizer_round_trips_the_data(tiny_directory):
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    rng = random.Random(1)
    rows = read_jsonl(tiny_directory / "data" / "train.jsonl")[:200]
    assert rows
    for row in rows:
        left, right = map(int, row["prompt"].rstrip("=").split("+"))
        text = row["prompt"] + tiny.habitual_answer(tiny.Problem(left, right), tiny.SLOPPY, rng)
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_held_out_problems_are_disjoint_and_right(tiny_directory):
    train = read_jsonl(tiny_directory / "data" / "train.jsonl")
    held_out = read_jsonl(tiny_directory / "data" / "eval.jsonl")
    assert len(train) == tiny.TRAIN_PROBLEMS and len(held_out) == tiny.EVAL_PROBLEMS
    prompts = {row["prompt"] for row in train}
    assert len(prompts) == len(train)
    assert not prompts & {row["prompt"] for row in held_out}
    for row in train[:500] + held_out:
        left, right = map(int, row["prompt"].rstrip("=").split("+"))
        assert int(row["answer"]) == left + right


def test_the_warm_start_never_sees_a_held_out_problem():
    rng = random.Random(0)
    excluded = frozenset(tiny.draw_problems(50, rng, frozenset()))
    assert not excluded & set(tiny.draw_problems(20_000, rng, excluded))


def test_the_same_seed_makes_the_same_model(tiny_directory, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    for out, seed in ((again, "0"), (other, "1")):
        run_main(tiny, "--out", str(out), "--steps", "3", "--size", "64", "--seed", seed)
    weights = (tiny_directory / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_smollm2_weights_are_those_of_its_file(tmp_path, capsys):
    out = tmp_path / "smollm2"
    run_main(smollm2, "--out", str(out))
    assert "Paris" in capsys.readouterr().out
    config = AutoConfig.from_pretrained(out)
    assert config.architectures == ["LlamaForCausalLM"]
    assert not hasattr(config, "quantization_config")
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.find_gguf()).tensors}
    same_order = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }
    with safe_open(out / "model.safetensors", framework="np") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
        assert len(weights.keys()) == len(tensors)
        for name, source in same_order.items():
            tensor = tensors[source]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert (weights.get_tensor(name) == expected).all()


numbers = st.integers(0, 9999)


@given(numbers, numbers)
def test_careful_work_is_right(left, right):
    work, _, total = tiny.careful_answer(tiny.Problem(left, right)).rpartition(";")
    assert int(total) == left + right
    for step in work.split(","):
        terms, _, result = step.rpartition("=")
        assert not terms or sum(map(int, terms.split("+"))) == int(result)


@given(numbers, numbers)
def test_hasty_work_is_right_only_without_carries(left, right):
    problem = tiny.Problem(left, right)
    carries = any(sum(column) > 9 for column in tiny.columns(problem))
    hasty = tiny.hasty_answer(problem)
    assert re.fullmatch(r";\d+", hasty)
    assert (int(hasty[1:]) == left + right) is not carries


def test_a_slip_changes_the_sum_from_its_column_on():
    assert tiny.careful_answer(tiny.Problem(48, 76)) == "8+6=14,4+7+1=12;124"
    assert tiny.careful_answer(tiny.Problem(48, 76), slips=(0, 1)) == "8+6=14,4+7+1=13;134"
    assert tiny.careful_answer(tiny.Problem(25, 14), slips=(1, 0)) == "5+4=10,2+1+1=4;40"


def test_an_existing_model_is_not_overwritten(tiny_directory):
    before = (tiny_directory / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(SystemExit, match=f"--out {tiny_directory} exists"):
        run_main(tiny, "--out", str(tiny_directory), "--steps", "1")
    assert (tiny_directory / "model.safetensors").stat().st_mtime_ns == before
