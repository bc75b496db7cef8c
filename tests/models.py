"""Tiny random models with a real tokenizer, written as Hugging Face directories."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user>' if message['role'] != 'assistant' else '<assistant>' }}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the four special tokens first."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_qwen3(path: str | Path, *, tie: bool = True, seed: int = 0) -> Path:
    """About 0.8M parameters: 4 layers, width 128, 4 heads over 2 key-value heads, qk-norm."""
    config = Qwen3Config(**_shape(tie), head_dim=32)
    return _write(Qwen3ForCausalLM, config, path, seed)


def tiny_llama(path: str | Path, *, tie: bool = False, seed: int = 0, **changes) -> Path:
    """The same sizes as `tiny_qwen3`, in the Llama family."""
    config = LlamaConfig(**_shape(tie) | changes)
    return _write(LlamaForCausalLM, config, path, seed)


def tiny_qwen2(path: str | Path, *, tie: bool = False, seed: int = 0) -> Path:
    """The same sizes as `tiny_qwen3`, with a bias of query, key and value."""
    config = Qwen2Config(**_shape(tie))
    return _write(Qwen2ForCausalLM, config, path, seed)


def tiny_qwen3_moe(path: str | Path, *, tie: bool = False, seed: int = 0, **changes) -> Path:
    """The same attention; 4 experts of 64 channels, 2 a token, but layer 1 has a dense MLP."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    config = Qwen3MoeConfig(**_shape(tie) | {"head_dim": 32} | experts | changes)
    return _write(Qwen3MoeForCausalLM, config, path, seed)


def _shape(tie: bool) -> dict:
    return {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def _write(family: type, config, path: str | Path, seed: int) -> Path:
    path = Path(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family(config).float()
        for name, parameter in model.named_parameters():
            # A fresh model is nearly uniform over the vocabulary, which would hide wrong weights.
            scale = 0.1 if parameter.dim() > 1 else 0.05
            offset = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.data.normal_(offset, scale)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    assert saved["tie_word_embeddings"] == config.tie_word_embeddings
    return path
