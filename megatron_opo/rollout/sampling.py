"""The responses to one prompt: asked for at once, or turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_opo.batch import Prompt, Sample
from megatron_opo.rollout.answers import count, prefill_request, read_samples, sampling_request
from megatron_opo.rollout.episode import Episode, Play
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.requests import Requests
from megatron_opo.rollout.seeds import sample_seed
from megatron_opo.rollout.wire import all_of

# A shorter prompt is computed faster than it is asked for.
SHARED_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Sampling:
    """What is the same for all prompts of one `Rollout.generate`; see there.

    `seed` is the run's, of which every sample's own is made; None: the servers draw as they like.
    `wanted` is the version that every token must come from, None: any.
    """

    servers: Sequence[Server]
    samples_per_prompt: int
    version: int
    wanted: int | None
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    purpose: str
    vocab_size: int
    seed: int | None
    play: Play | None
    shares_prompts: bool

    async def respond(self, requests: Requests, prompt: Prompt) -> tuple[Sample, ...]:
        """All samples of a prompt."""
        if self.play is not None:
            indices = range(self.samples_per_prompt)
            return tuple(await all_of(self._play(requests, prompt, i) for i in indices))
        seeds = None
        if self.seed is not None:
            seeds = [self._seed(prompt, i) for i in range(self.samples_per_prompt)]
        before = prefill_request(prompt) if self.computes_first(prompt) else None
        return await self._ask(
            requests,
            prompt,
            seeds,
            self.samples_per_prompt,
            f"prompt {prompt.id}",
            most=self.max_response_tokens,
            before=before,
        )

    def computes_first(self, prompt: Prompt) -> bool:
        """Whether a request before that for the samples has the prompt computed, so that they find
        it in the cache. With `n`, where the server draws as it likes, it does so by itself."""
        return (
            self.shares_prompts
            and self.play is None
            and self.seed is not None
            and self.samples_per_prompt > 1
            and len(prompt.token_ids) >= SHARED_PROMPT_TOKENS
        )

    async def _play(self, requests: Requests, prompt: Prompt, index: int) -> Sample:
        assert self.play is not None
        # A token is drawn by its seed and its position, so all turns can have the same one.
        seeds = None if self.seed is None else [self._seed(prompt, index)]
        last = ""

        async def ask(ids: list[int], most: int, stop: tuple[str, ...]) -> Sample:
            nonlocal last
            so_far = replace(prompt, token_ids=tuple(ids))
            what = f"prompt {prompt.id}, sample {index}"
            (found,) = await self._ask(
                requests, so_far, seeds, 1, what, most=most, stop=stop, last=last
            )
            last = found.server
            return found

        episode = Episode(prompt, index, ask, self.play.tokenizer, self.max_response_tokens)
        return await self.play(episode)

    async def _ask(
        self,
        requests: Requests,
        prompt: Prompt,
        seeds: list[int] | None,
        samples: int,
        what: str,
        *,
        most: int,
        stop: tuple[str, ...] = (),
        before: dict[str, Any] | None = None,
        last: str = "",
    ) -> tuple[Sample, ...]:
        body = sampling_request(
            prompt,
            count=samples,
            seeds=seeds,
            temperature=self.temperature,
            top_p=self.top_p,
            max_response_tokens=most,
            stop_token_ids=self.stop_token_ids,
            stop=stop,
        )

        def read(answer: Any, server: Server) -> tuple[Sample, ...]:
            found = read_samples(
                answer,
                prompt,
                count=samples,
                vocab_size=self.vocab_size,
                server=server.url,
                version=self.wanted,
            )
            requests.stats.cached_tokens += count(answer, "cached_tokens")
            return found

        return await requests.ask(self.servers, body, read, samples, what, before, last)

    def _seed(self, prompt: Prompt, index: int) -> int:
        assert self.seed is not None
        return sample_seed(self.seed, self.purpose, self.version, prompt.id, index)
