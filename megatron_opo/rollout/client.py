"""The trainer's side of the servers: sample groups, score texts, replace weights."""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_opo.batch import Group, Prompt
from megatron_opo.errors import OnPolicyError, ServerError
from megatron_opo.recipe import ModelConfig, RolloutConfig, SyncConfig
from megatron_opo.rollout.answers import check_ids, read_prefill_logprobs
from megatron_opo.rollout.buckets import Weights
from megatron_opo.rollout.episode import Play
from megatron_opo.rollout.health import (
    OnWait,
    find_answering,
    wait_for_one,
    wait_for_starting,
)
from megatron_opo.rollout.keeper import Keeper, ServersLostError, print_warning
from megatron_opo.rollout.process import Server, close_servers
from megatron_opo.rollout.requests import Requests, RolloutStats, for_each
from megatron_opo.rollout.sampling import Sampling
from megatron_opo.rollout.shared_memory import SharedBucket
from megatron_opo.rollout.sync import SyncStats, WeightSync
from megatron_opo.rollout.wire import all_of, call, open_session
from megatron_opo.spans import Spans

OnGroup = Callable[[Group], None]


class Rollout:
    """A pool of servers, of which those in `serving` hold the current weights.

    Launched servers start with the model directory's weights as version 0. What servers given by
    rollout.urls hold is unknown, so `needs_sync` is true until the first `sync`.

    A server that is lost (it has ended, does not answer, or holds other weights) no longer serves;
    `Keeper` starts it again where it can. It serves again after the next `sync` that finds it.

    Methods block; use it from one thread, which must live as long as the servers shall. They must
    answer already (`wait_healthy`).
    """

    def __init__(
        self,
        servers: Sequence[Server],
        rollout: RolloutConfig,
        sync: SyncConfig,
        model: ModelConfig,
        *,
        disk_dir: Path,
        seed: int | None = None,
        device: str = "cpu",
        shared: SharedBucket | None = None,
        warn: Callable[[str], None] = print_warning,
        spans: Spans | None = None,
    ):
        """
        Args:
            seed: of which every sample's own is made; None: the servers draw as they like.
            disk_dir: where sync.transport "disk" puts weights; the servers must see it too.
            device: what the servers compute on, "cpu" or "cuda".
            shared: what sync.transport "shared_memory" sends by.
            warn: told of every server that is lost, and of every start of one.
            spans: those of this process; every request is noted on the track of its server.
        """
        config = json.loads((Path(model.path) / "config.json").read_text())
        kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        self.servers = list(servers)
        self.stats = RolloutStats()
        self.needs_sync = not all(server.launched for server in servers)
        self._config = rollout
        self._seed = seed
        self._caches_prompts = True
        self._keeper = Keeper(servers, rollout, device, warn)
        self._vocab_size = int(config["vocab_size"])
        self._spans = spans or Spans()
        for server in servers:
            server.spans = self._spans
        self._sync = WeightSync(
            sync, model, kv_heads, rollout.start_timeout_s, disk_dir, shared, self._spans
        )

    @property
    def serving(self) -> list[Server]:
        """Those that hold the current weights."""
        return self._keeper.serving

    @property
    def restarts(self) -> int:
        """How often a server was started again."""
        return self._keeper.restarts

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        version: int,
        temperature: float,
        max_response_tokens: int,
        purpose: str = "train",
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        on_group: OnGroup | None = None,
        enough: int | None = None,
        required: Collection[Prompt] = (),
        require_version: bool = True,
        play: Play | None = None,
    ) -> list[Group]:
        """Sample every prompt; groups in the order of `prompts`, each with all of its samples.

        The longest prompts are sent first, and each is computed once for all of its samples.

        Args:
            version: the weights that every token must come from, unless `require_version` is
                false.
            purpose: samples of one prompt by one version are drawn anew for another purpose.
            on_group: called with each group as it arrives.
            enough: give up the others when so many groups are there, those of `required` among
                them.
            play: how a response of several turns comes about; None: the policy speaks once.

        Raises:
            ServersLostError: no server serves any more.
            OnPolicyError: the last sync did not complete.
            ServerError: a prompt failed on every attempt.
            DataError: a prompt is empty or has ids outside the model's vocabulary.
        """
        self._refuse_unknown_weights()
        for prompt in prompts:
            check_ids(prompt.token_ids, self._vocab_size, f"prompt {prompt.id}")
        self.stats = RolloutStats()
        start = time.monotonic()
        sampling = Sampling(
            servers=self.servers,
            samples_per_prompt=samples_per_prompt,
            version=version,
            wanted=version if require_version else None,
            temperature=temperature,
            top_p=top_p,
            max_response_tokens=max_response_tokens,
            stop_token_ids=tuple(stop_token_ids),
            purpose=purpose,
            vocab_size=self._vocab_size,
            seed=self._seed,
            play=play,
            shares_prompts=self._caches_prompts,
        )

        async def sample(requests: Requests, prompt: Prompt) -> Group:
            group = Group(prompt, await sampling.respond(requests, prompt))
            self._count(group, time.monotonic() - start)
            if on_group is not None:
                on_group(group)
            return group

        first = {place for place, prompt in enumerate(prompts) if prompt in required}

        def is_enough(there: Collection[int]) -> bool:
            return enough is not None and len(there) >= enough and first.issubset(there)

        came = asyncio.run(
            for_each(
                prompts,
                sample,
                self._keeper,
                self.stats,
                samples_each=samples_per_prompt,
                size=lambda prompt: len(prompt.token_ids),
                is_enough=is_enough,
            )
        )
        self.stats.seconds = time.monotonic() - start
        if any(map(sampling.computes_first, prompts)):
            # Some of SGLang's deterministic attention backends switch the cache off.
            self._caches_prompts = self.stats.cached_tokens > 0
        chosen = sorted(came, key=lambda place: place not in first)[:enough]
        self.stats.given_up = len(prompts) - len(chosen)
        return [came[place] for place in sorted(chosen)]

    def score_tokens(
        self, sequences: Sequence[Sequence[int]], *, server: int = 0
    ) -> list[list[float]]:
        """Logprobs that one server gives to fixed texts, computed by prefill.

        The server ignores any sampling temperature here: compare with the trainer's logprobs at
        temperature 1.

        Returns:
            For each sequence of n ids the n - 1 logprobs of its second to last id.

        Raises:
            ServerError, DataError, OnPolicyError: as `generate`.
        """
        self._refuse_unknown_weights()
        for i, sequence in enumerate(sequences):
            check_ids(sequence, self._vocab_size, f"sequence {i}")

        async def score(requests: Requests, ids: Sequence[int]) -> list[float]:
            body = {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            return await requests.ask(
                [self.servers[server]],
                body,
                lambda answer, _: read_prefill_logprobs(answer, list(ids)),
                1,
                "a text to be scored",
            )

        found = asyncio.run(
            for_each(sequences, score, self._keeper, RolloutStats(), samples_each=1, size=len)
        )
        return [found[place] for place in range(len(sequences))]

    def sync(self, weights: Weights, version: int) -> SyncStats:
        """Give the servers that answer these weights and call them `version`.

        Sampling stops first and resumes only when every one of them holds every tensor, the
        checksums agree (sync.verify) and all report `version`: these serve then. After any error
        `generate` refuses until a later sync succeeds.

        Args:
            weights: Hugging Face names and whole tensors. Not read to its end after an error.

        Raises:
            ServersLostError: some were lost meanwhile, and those in `serving` were not; or none
                answers.
            WeightError: a tensor is not finite, or a server holds something else than was sent.
            ServerError: a server refuses a step.
        """
        self.needs_sync = True
        with self._spans.of("look"):
            servers = asyncio.run(find_answering(self._keeper))
        if not servers:
            raise ServersLostError("no server answers, so none can be given weights")
        self._take_in(servers)
        try:
            stats = asyncio.run(self._sync.update(servers, weights, version))
        except ServerError as error:
            if not (lost := self._lost_of(servers)):
                raise
            first_line = str(error).partition("\n")[0]
            raise ServersLostError(f"{lost} lost while weights were sent: {first_line}") from None
        self.needs_sync = False
        return stats

    def differing_weights(self) -> str | None:
        """In what way servers hold other weights than the latest `sync` sent them, "" if they hold
        the same; None where they cannot be asked (sync.verify is off, nothing was sent yet, they
        have given their memory back, or do not answer)."""
        try:
            return asyncio.run(self._sync.differing(list(self.serving)))
        except ServerError:
            return None

    def release(self, on_wait: OnWait | None = None) -> None:
        """Have the servers give the memory of weights and cache back; the next `sync` takes it.

        Nothing can be sampled until then, as their weights are gone. Without effect when it was
        given back already. Waits for servers that are starting, as these take memory, too.

        Args:
            on_wait: as of `wait_healthy`.

        Raises:
            ServerError: a server refuses.
        """
        self.needs_sync = True
        while servers := asyncio.run(wait_for_starting(self._keeper, on_wait)):
            self._take_in(servers)
            try:
                asyncio.run(self._sync.release(servers))
                return
            except ServerError:
                if not self._lost_of(servers):
                    raise

    def start_profile(self, directory: Path, name: str) -> None:
        """Have each launched server that serves profile itself, until `stop_profile`, into files
        NAME_SERVER... of an absolute directory.

        Raises:
            ServerError: one refuses.
        """

        def body(server: Server) -> dict[str, Any]:
            return {
                "output_dir": str(directory),
                "profile_prefix": name,
                "profile_id": server.name.replace(" ", "_"),
                "activities": ["CPU", "GPU"],
                "with_stack": False,
                "record_shapes": False,
            }

        asyncio.run(self._call_launched("/start_profile", body))

    def stop_profile(self) -> None:
        """The files are written when this returns.

        Raises:
            ServerError: one does not, such as one that was started again meanwhile.
        """
        asyncio.run(self._call_launched("/stop_profile", lambda _: {}))

    async def _call_launched(self, path: str, body: Callable[[Server], dict[str, Any]]) -> None:
        timeout_s = self._config.request_timeout_s
        async with open_session() as session:
            await all_of(
                call(session, server, path, body(server), timeout_s=timeout_s)
                for server in self.serving
                if server.launched
            )

    def wait_for_one(self, on_wait: OnWait | None = None) -> None:
        """Return when a server answers, so that a sync can make it serve.

        Raises:
            ServerError: none is left that could come: those that were launched have used up
                rollout.max_restarts, those given by URL do not answer in rollout.start_timeout_s.
        """
        asyncio.run(wait_for_one(self._keeper, on_wait))

    def _take_in(self, servers: list[Server]) -> None:
        for server in servers:
            if server not in self.serving:
                self._sync.forget(server)
        self._keeper.serving = list(servers)

    def _lost_of(self, servers: Sequence[Server]) -> str:
        """The names of those that no longer answer."""
        asyncio.run(find_answering(self._keeper))
        return ", ".join(server.name for server in servers if server not in self.serving)

    def close(self) -> None:
        """Stop the servers that were launched; those given by URL keep running."""
        self._sync.close()
        close_servers(self.servers)

    def _refuse_unknown_weights(self) -> None:
        self._keeper.look()
        if not self.serving:
            raise ServersLostError("no server holds the current weights")
        if self.needs_sync:
            raise OnPolicyError(
                "the servers' weights are unknown: they were given by rollout.urls and never "
                "synced, or their memory was released since, or the last sync did not complete. "
                "Nothing is sampled until a sync succeeds"
            )

    def _count(self, group: Group, seconds: float) -> None:
        stats, samples = self.stats, group.samples
        stats.samples += len(samples)
        stats.prompt_tokens += len(group.prompt.token_ids)
        stats.read_tokens += len(group.prompt.token_ids) * len(samples)
        stats.response_tokens += sum(sample.length for sample in samples)
        stats.arrivals.append(seconds)
