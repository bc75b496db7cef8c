"""Responses of several turns: a function of the user's has the policy speak, and answers it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opo.batch import Prompt, Sample
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.recipe import RolloutConfig
from megatron_opo.user_code import LoadError, describe, load, resolve

# Token ids so far, most tokens to sample, stop strings -> what was sampled.
Ask = Callable[[list[int], int, tuple[str, ...]], Awaitable[Sample]]


class EpisodeFullError(Exception):
    """rollout.max_response_tokens are there. A function need not catch it: the episode ends."""


@dataclass(frozen=True)
class Turn:
    """What the policy said at once. `stop` is the stop string that ended it, which stands in
    `text`, or None; `cut` is true where the number of tokens ended it."""

    text: str
    stop: str | None
    cut: bool


class Episode:
    """One response in the making: what the policy samples, and what is added to it.

    Only tokens that the policy sampled carry loss and count for lengths. They are kept as they
    were sampled and never tokenised again.
    """

    def __init__(self, prompt: Prompt, index: int, ask: Ask, tokenizer: Any, max_tokens: int):
        """
        Args:
            index: of the sample in its group.
            max_tokens: of the response, added ones included.
        """
        self.prompt = prompt
        self._index = index
        self._ask = ask
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._own: list[bool] = []
        self._added: list[tuple[int, int]] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._server = ""
        self._cut = self._full = self._busy = False
        self.failure: OpoError | None = None

    @property
    def text(self) -> str:
        """The response so far, special tokens left out."""
        return "".join(self._texts)

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return self._max_tokens - len(self._ids)

    async def generate(
        self, *, stop: str | Sequence[str] = (), max_tokens: int | None = None
    ) -> Turn:
        """Let the policy go on until its end token, a stop string or a number of tokens.

        Raises:
            EpisodeFullError: there is no room, or `max_tokens` is 0.
            RuntimeError: the last call has not returned yet.
        """
        if self._busy:
            raise RuntimeError("generate() was called while the episode was still generating")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        limit = self.room if max_tokens is None else min(max_tokens, self.room)
        self._busy = True
        try:
            await asyncio.sleep(0)  # so that a loop that catches everything can still be ended
            if limit <= 0:
                self._full = self.room <= 0
                raise EpisodeFullError
            sample = await self._ask([*self.prompt.token_ids, *self._ids], limit, stops)
        except OpoError as error:
            self.failure = error
            raise
        finally:
            self._busy = False
        self._extend(sample.response_ids, sample.text, own=True)
        self._logprobs += sample.logprobs
        self._versions += sample.versions
        self._server = sample.server
        self._cut = sample.finish_reason == "length"
        found = next((each for each in stops if each in sample.text), None)
        return Turn(sample.text, found, self._cut)

    def add(self, text: str) -> None:
        """Let the environment say something. Special tokens in it are taken as such.

        Raises:
            EpisodeFullError: there is no room for it; nothing is added.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > self.room:
            self._full = True
            raise EpisodeFullError
        start = len(self.text)
        if self._added and self._added[-1][1] == start:
            start = self._added.pop()[0]
        self._extend(ids, text, own=False)
        if len(self.text) > start:
            self._added.append((start, len(self.text)))
        self._logprobs += [0.0] * len(ids)
        self._versions += self._versions[-1:] * len(ids)
        self._cut = False

    def _extend(self, ids: Sequence[int], text: str, *, own: bool) -> None:
        self._ids += ids
        self._own += [own] * len(ids)
        self._texts.append(text)

    def sample(self, error: str | None = None) -> Sample:
        """What it came to. A sample with an error, or without a token of the policy's, cannot be
        scored."""
        if error is None and not any(self._own):
            error = "rollout.function ended before the policy had said anything"
        is_cut = self._full or (self._cut and self.room <= 0)
        # What was added before the policy spoke has no version of its own.
        first = self._versions[:1] * (len(self._ids) - len(self._versions))
        return Sample(
            group_id=self.prompt.id,
            index=self._index,
            response_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=(*first, *self._versions),
            finish_reason="length" if is_cut else "stop",
            text=self.text,
            server=self._server,
            reward_error=error,
            loss_mask=tuple(self._own),
            added=tuple(self._added),
        )


@dataclass(frozen=True)
class Play:
    """rollout.function, loaded. `timeout_s` is for one episode; `path` is the file."""

    function: Callable[[Episode], Awaitable[None]]
    path: str
    timeout_s: float
    tokenizer: Any

    async def __call__(self, episode: Episode) -> Sample:
        """Play it to its end. What the function does wrong is the sample's `reward_error`.

        Raises:
            OpoError: a request failed for good, whatever the function made of that.
        """
        problem = None
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                await self.function(episode)
        except EpisodeFullError:
            pass
        except Exception as error:  # a tool's own TimeoutError, too
            problem = f"rollout.function: {describe(error, self.path)}"
            if limit.expired():
                problem = f"rollout.function took over {self.timeout_s:g} s"
        if episode.failure is not None:
            raise episode.failure
        return episode.sample(problem)


def find_function(config: RolloutConfig) -> str | None:
    """rollout.function with its path made absolute; None where there is none.

    Raises:
        RecipeError: there is no such file.
    """
    if config.function is None:
        return None
    try:
        return resolve(config.function)
    except LoadError as error:
        raise RecipeError(f"rollout.function: {error}") from None


def load_play(config: RolloutConfig, tokenizer: Any) -> Play | None:
    """None where there is no rollout.function.

    Raises:
        RecipeError: the function cannot be loaded, or is not an async one of one argument.
    """
    function = find_function(config)
    if function is None:
        return None
    try:
        target = load(function)
    except LoadError as error:
        raise RecipeError(f"rollout.function: {error}") from None
    if not inspect.iscoroutinefunction(target):
        raise RecipeError(
            f"rollout.function: {config.function!r} is not an async function; define it as "
            "`async def NAME(episode):` and await episode.generate() in it"
        )
    try:
        inspect.signature(target).bind(None)
    except TypeError as error:
        raise RecipeError(
            f"rollout.function: {config.function!r} is called with one argument, the episode: "
            f"{error}"
        ) from None
    return Play(target, function.rpartition(":")[0], config.function_timeout_s, tokenizer)
