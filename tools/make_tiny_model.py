"""Make the quickstart's model and data: a tiny Qwen3 that adds two numbers, and not too well.

The task is column addition with its work shown, right to left, then the sum::

    48+76=    8+6=14,4+7+1=12;124

The model is warm-started like a pupil who first learns to do it properly and then picks up two
habits. Careful: the work above, with a slip now and then. Hasty: no work, and the carries
forgotten, so mostly wrong ("48+76=;114"). Sampled at temperature 1 it is right about a third of
the time, and both habits carry real probability: that is what reinforcement learning has to sort
out.

    python tools/make_tiny_model.py --out models/tiny_arithmetic

writes a Hugging Face model directory with data/train.jsonl and data/eval.jsonl in it
({"prompt", "answer"}; no problem of eval.jsonl is in train.jsonl or in the warm start). It takes
about a minute on one core.
"""

import argparse
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ALPHABET = "0123456789+=,;"
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1  # they open the vocabulary
IGNORED = -100  # label of tokens without loss

TRAIN_PROBLEMS = 20_000
EVAL_PROBLEMS = 128
ROWS_PER_STEP = 32
LEARNING_RATE = 2e-3
PROPER_SHARE = 0.7  # of the warm start's steps, before the habits set in


@dataclass(frozen=True)
class Habits:
    """How the warm start's answers are written."""

    careful: float  # share of answers that show their work
    slip: float  # chance that a column of careful work is off by one


PROPER = Habits(careful=1.0, slip=0.0)
SLOPPY = Habits(careful=0.5, slip=0.08)


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def columns(problem: Problem) -> list[tuple[int, ...]]:
    """Digits of each column, rightmost first; a shorter number stops contributing."""
    left, right = str(problem.left)[::-1], str(problem.right)[::-1]
    return [
        tuple(int(number[i]) for number in (left, right) if i < len(number))
        for i in range(max(len(left), len(right)))
    ]


def careful_answer(problem: Problem, slips: tuple[int, ...] = ()) -> str:
    """Column by column with the carry written out, then the sum. `slips[i]` is added to the
    result of column i, and the work goes on from there as if it were right."""
    steps, digits, carry = [], [], 0
    for i, column in enumerate(columns(problem)):
        terms = (*column, carry) if carry else column
        result = sum(terms) + (slips[i] if i < len(slips) else 0)
        steps.append("+".join(map(str, terms)) + f"={result}" if len(terms) > 1 else f"{result}")
        carry, digit = divmod(max(result, 0), 10)
        digits.append(digit)
    if carry:
        digits.append(carry)
    return ",".join(steps) + ";" + "".join(map(str, reversed(digits)))


def hasty_answer(problem: Problem) -> str:
    """Each column added on its own; carries are dropped."""
    return ";" + "".join(str(sum(column) % 10) for column in reversed(columns(problem)))


def habitual_answer(problem: Problem, habits: Habits, rng: random.Random) -> str:
    if rng.random() >= habits.careful:
        return hasty_answer(problem)
    slips = []
    for column in columns(problem):
        off = rng.choice((-1, 1)) if sum(column) > 0 else 1
        slips.append(off if rng.random() < habits.slip else 0)
    return careful_answer(problem, tuple(slips))


def draw_problem(rng: random.Random) -> Problem:
    def number() -> int:
        return rng.randrange(10, 100) if rng.random() < 0.5 else rng.randrange(100, 1000)

    return Problem(number(), number())


def draw_problems(count: int, rng: random.Random, excluded: frozenset[Problem]) -> list[Problem]:
    """`count` different problems, none of them excluded."""
    chosen: dict[Problem, None] = {}
    while len(chosen) < count:
        problem = draw_problem(rng)
        if problem not in excluded:
            chosen[problem] = None
    return list(chosen)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, nothing added, so that text and ids map one to one."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


def make_rows(
    tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompt, answer) pairs -> ids and labels, both [rows, longest], padded on the right."""
    rows = []
    for prompt, answer in texts:
        prompt_ids = tokenizer(prompt)["input_ids"]
        rows.append((prompt_ids, [*tokenizer(answer)["input_ids"], EOS_ID]))
    longest = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), longest), PAD_ID)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (prompt_ids, answer_ids) in enumerate(rows):
        end = len(prompt_ids) + len(answer_ids)
        ids[i, :end] = torch.tensor(prompt_ids + answer_ids)
        labels[i, len(prompt_ids) : end] = torch.tensor(answer_ids)
    return ids, labels


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    excluded: frozenset[Problem],
    steps: int,
) -> None:
    """Supervised training on `steps` fresh batches of answers: first proper, then sloppy ones."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    warmup = max(1, steps // 25)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.03, 1 - step / steps))
    )
    start = time.monotonic()
    for step in range(steps):
        habits = PROPER if step < PROPER_SHARE * steps else SLOPPY
        problems = draw_problems(ROWS_PER_STEP, rng, excluded)
        texts = [(p.prompt, habitual_answer(p, habits, rng)) for p in problems]
        ids, labels = make_rows(tokenizer, texts)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % max(1, steps // 10) == 0:
            seconds = time.monotonic() - start
            kind = "proper" if habits is PROPER else "sloppy"
            print(
                f"  warm start {step + 1:4d}/{steps}  {kind} answers, loss {loss.item():.3f}, "
                f"{seconds:.0f} s",
                flush=True,
            )


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> float:
    """Share of problems whose one sample at temperature 1 ends in the right sum."""
    by_length: dict[int, list[Problem]] = {}
    for problem in problems:
        by_length.setdefault(len(problem.prompt), []).append(problem)
    right = 0
    for group in by_length.values():
        ids = torch.tensor([tokenizer(p.prompt)["input_ids"] for p in group])
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            ids,
            do_sample=True,
            top_k=0,
            max_new_tokens=40,
            use_cache=True,
            attention_mask=torch.ones_like(ids),
        )
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        for problem, text in zip(group, texts, strict=True):
            right += text.rpartition(";")[2] == problem.answer
    return right / len(problems)


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.write_text("".join(row + "\n" for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500, help="of the warm start")
    parser.add_argument("--size", type=int, default=128, help="hidden size of the model")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.out.exists():
        raise SystemExit(f"error: --out {arguments.out} exists; delete it or choose another")
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the same model on every machine, and as fast at this size
    rng = random.Random(arguments.seed)
    held_out = draw_problems(EVAL_PROBLEMS, rng, frozenset())
    excluded = frozenset(held_out)
    train = draw_problems(TRAIN_PROBLEMS, rng, excluded)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments.size, arguments.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"A tiny Qwen3 of {parameters:,} parameters learns to add, about a minute", flush=True)
    warm_start(model, tokenizer, rng, excluded, arguments.steps)
    right = accuracy(model, tokenizer, held_out)
    print(f"right on {right:.0%} of {len(held_out)} held-out problems at temperature 1", flush=True)

    # Renamed when complete, so that an interrupted run leaves nothing that looks like a model.
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_jsonl(partial / "data" / "train.jsonl", train)
    write_jsonl(partial / "data" / "eval.jsonl", held_out)
    partial.rename(arguments.out)
    print(f"wrote {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
