"""Rows -> tokenised prompts, and the cursor that deals them out."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_opo.batch import Prompt
from megatron_opo.errors import CheckpointError, DataError, RecipeError
from megatron_opo.recipe import DataConfig, DatasetConfig
from megatron_opo.rows import Row, read_rows

TOKENIZE_ROWS = 1024


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a dataset. The id of each is its row in the source, from 0."""

    split: str
    prompts: tuple[Prompt, ...]
    rows: int
    overlong: int
    repeated: int
    max_prompt_tokens: int
    held_out: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any token, answer, source or order of the prompts."""
        digest = hashlib.blake2b(digest_size=16)
        for p in self.prompts:
            fields = [p.token_ids, p.data_source, p.ground_truth, p.extra_info]
            digest.update(json.dumps(fields, sort_keys=True).encode())
        return digest.hexdigest()

    def summary(self) -> str:
        """Such as "train: 9,988 prompts (12 of 10,000 filtered: longer than 512 tokens)"."""
        notes = []
        if self.overlong:
            notes.append(
                f"{self.overlong:,} of {self.rows:,} filtered: longer than "
                f"{self.max_prompt_tokens} tokens"
            )
        if self.held_out:
            notes.append(f"{self.held_out:,} left out: they ask what the evaluation asks")
        if self.repeated:
            notes.append(f"{self.repeated:,} repeat an earlier prompt")
        return f"{self.split}: {len(self):,} prompts" + (f" ({'; '.join(notes)})" if notes else "")


def load_tokenizer(model_path: str):
    """The tokenizer of a Hugging Face model directory; nothing is downloaded.

    Raises:
        RecipeError: no such directory, or no usable tokenizer in it.
    """
    from transformers import AutoTokenizer

    if not Path(model_path).is_dir():
        raise RecipeError(
            f"model.path: {model_path} is not a directory; give a Hugging Face model directory "
            f"(config.json, *.safetensors, tokenizer files). Relative paths begin at {Path.cwd()}"
        )
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # each tokenizer class fails in its own way on a missing file
        found = ", ".join(sorted(p.name for p in Path(model_path).iterdir())) or "nothing"
        raise RecipeError(
            f"model.path: no tokenizer can be loaded from {model_path} (found: {found}); it needs "
            f"tokenizer.json or the files of its tokenizer class: {type(error).__name__}: {error}"
        ) from None


def check_tokenizer(tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that the model cannot work with; `vocab_size` is the model's.

    Raises:
        RecipeError: an id has no row in the model's embedding, or no token ends a response.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise RecipeError(
            f"model.path: the tokenizer's largest id is {largest} ({token!a}) but the model's "
            f"vocab_size is {vocab_size} (ids 0 to {vocab_size - 1}): tokenizer and weights do "
            "not belong together; use the files of one model, or enlarge its embedding"
        )
    if tokenizer.eos_token_id is None:
        raise RecipeError(
            "model.path: the tokenizer has no eos_token, so no response could ever end by itself; "
            "set eos_token in tokenizer_config.json"
        )


def check_template(data: DataConfig, tokenizer) -> None:
    """Raises DataError: the recipe asks for a chat template that the tokenizer does not have."""
    if data.apply_chat_template and tokenizer.chat_template is None:
        raise DataError(
            "data.apply_chat_template is true but the tokenizer has no chat template: set "
            "data.apply_chat_template=false to send prompts as plain text"
        )


def load_prompts(
    dataset: DatasetConfig, data: DataConfig, tokenizer, split: str = "train"
) -> PromptSet:
    """Read, check, render and tokenise a whole dataset; over-long prompts are filtered or refused.

    Raises:
        DataError: a file or row that cannot be used, or no row that is short enough.
        RecipeError: a procedural task or an option of it that does not exist.
    """
    check_template(data, tokenizer)
    prompts, overlong = [], []
    read = 0
    for rows in _chunks(read_rows(dataset, split)):
        texts = [render(row, data, tokenizer) for row in rows]
        for row, text, ids in zip(rows, texts, tokenize(texts, data, tokenizer), strict=True):
            if not ids:
                raise DataError(f"{row.where}: the prompt {text!r} has no tokens")
            if len(ids) > data.max_prompt_tokens:
                overlong.append((row.where, len(ids)))
            else:
                prompts.append(
                    Prompt(str(read), ids, text, row.data_source, row.ground_truth, row.extra_info)
                )
            read += 1
    if overlong and (data.overlong_prompts == "error" or not prompts):
        where, length = overlong[0]
        raise DataError(
            f"{where}: the prompt has {length} tokens, data.max_prompt_tokens is "
            f"{data.max_prompt_tokens} ({len(overlong)} of {read} rows are longer): raise "
            "data.max_prompt_tokens, "
            + ("or set data.overlong_prompts=filter" if prompts else "no row is left otherwise")
        )
    repeated = len(prompts) - len({p.token_ids for p in prompts})
    return PromptSet(split, tuple(prompts), read, len(overlong), repeated, data.max_prompt_tokens)


def hold_out(train: PromptSet, evaluation: PromptSet) -> PromptSet:
    """The training prompts that the evaluation does not ask, compared token by token.

    Raises:
        DataError: none is left.
    """
    asked = {prompt.token_ids for prompt in evaluation.prompts}
    kept = tuple(prompt for prompt in train.prompts if prompt.token_ids not in asked)
    if not kept:
        raise DataError(
            f"every one of the {len(train)} training prompts stands in data.eval too: give other "
            "data, or set data.hold_out_eval=false to train on what is evaluated"
        )
    repeated = len(kept) - len({prompt.token_ids for prompt in kept})
    return replace(train, prompts=kept, repeated=repeated, held_out=len(train) - len(kept))


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == TOKENIZE_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def render(row: Row, data: DataConfig, tokenizer) -> str:
    """The text that the model continues.

    Raises:
        DataError: the chat template refuses the messages, or there are two system prompts.
    """
    messages = list(row.messages)
    if data.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(
                f"{row.where}: has a system message of its own, and data.system_prompt is set "
                "too: drop one of them"
            )
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    if not data.apply_chat_template:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program that comes with the model
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{row.where}: the tokenizer's chat template refuses the messages (roles: {roles}): "
            f"{type(error).__name__}: {error}"
        ) from None


def tokenize(texts: list[str], data: DataConfig, tokenizer) -> list[tuple[int, ...]]:
    """The ids of each text, as a server is given them."""
    plain = not data.apply_chat_template  # a template writes its special tokens itself
    rows = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    # Some tokenizers close every text with eos; a response cannot follow it.
    return [tuple(ids[:-1] if plain and ids and ids[-1] == eos else ids) for ids in rows]


def _order(rows: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Sorting by a hash depends on no library's generator, so it never changes under a run."""
    if not shuffle:
        return list(range(rows))

    def key(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=16).digest()

    return sorted(range(rows), key=key)


def _of_epoch(epoch: int, prompt: Prompt) -> Prompt:
    return replace(prompt, id=f"e{epoch}-{prompt.id}")


class PromptCursor:
    """Deals prompts out without end: every epoch has each prompt once, in an order of its own.

    The id of a dealt prompt is "e{epoch}-{row}", unique over the run. One that was not trained can
    be taken back; then it comes again, before all others.
    """

    def __init__(self, prompts: PromptSet, shuffle: bool, seed: int):
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        self._back: list[Prompt] = []
        self._times_back: dict[str, int] = {}
        self._start(epoch=0, position=0)

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._epoch_order = _order(len(self._prompts), self._shuffle, self._seed, epoch)

    def next(self, n: int) -> list[Prompt]:
        dealt, self._back = self._back[:n], self._back[n:]
        while len(dealt) < n:
            if self._position == len(self._epoch_order):
                self._start(self._epoch + 1, position=0)
            prompt = self._prompts.prompts[self._epoch_order[self._position]]
            dealt.append(_of_epoch(self._epoch, prompt))
            self._position += 1
        return dealt

    def take_back(self, prompts: list[Prompt]) -> None:
        """Which were dealt by the latest `next`."""
        times = {prompt.id: self.times_back(prompt) + 1 for prompt in prompts}
        self._times_back = times | {p.id: self.times_back(p) for p in self._back}
        self._back = [*prompts, *self._back]

    def times_back(self, prompt: Prompt) -> int:
        """How often it was taken back, if it still is, or was dealt by the latest `next`."""
        return self._times_back.get(prompt.id, 0)

    def state(self) -> dict[str, Any]:
        """JSON-like; the next prompt after `restore` is the next one now."""
        back = [[prompt.id, self.times_back(prompt)] for prompt in self._back]
        return {"epoch": self._epoch, "position": self._position, "back": back, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "prompts": len(self._prompts),
            "fingerprint": self._prompts.fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: it was taken from other prompts, or from another order of them.
            CheckpointError: it is not the state of a cursor.
        """
        identity = self._identity()
        missing = sorted({"epoch", "position", *identity} - set(state))
        if missing:
            raise CheckpointError(f"prompt cursor: the saved state lacks {', '.join(missing)}")
        for key in ("shuffle", "seed"):
            if state[key] != identity[key]:
                raise DataError(
                    f"the checkpoint was written with {key} {state[key]}, this recipe has "
                    f"{identity[key]}: the prompts would come in another order; set it back"
                )
        if state["fingerprint"] != identity["fingerprint"]:
            raise DataError(
                f"data.{self._prompts.split}: the checkpoint was written with other prompts "
                f"({state['prompts']:,} then, {len(self._prompts):,} now; fingerprint "
                f"{state['fingerprint']} then, {identity['fingerprint']} now): the files, their "
                "order, the tokenizer, its chat template or the filter changed; restore them, or "
                "start a new run from the exported model"
            )
        self._start(state["epoch"], state["position"])
        self._times_back = dict(state.get("back", ()))
        rows = {prompt.id: prompt for prompt in self._prompts.prompts} if self._times_back else {}
        self._back = []
        for name in self._times_back:
            epoch, _, row = name.removeprefix("e").partition("-")
            self._back.append(_of_epoch(int(epoch), rows[row]))
