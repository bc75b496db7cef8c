"""Real SGLang servers for the tests, launched once a session, and a proxy that injects faults.

The fixtures are registered by conftest.py: a test takes `qwen_pool` or `llama_pool` as argument.
"""

import asyncio
import json
import os
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, web
from models import tiny_llama, tiny_qwen3
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_opo.batch import Prompt
from megatron_opo.errors import OnPolicyError
from megatron_opo.recipe import ModelConfig, RolloutConfig, SyncConfig
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout import Rollout, Server, close_servers, launch_servers, wait_healthy
from megatron_opo.rollout.keeper import print_warning

START_TIMEOUT_S = 240.0
# Of all servers of the tests, so that a proxy knows it, too.
API_KEY = "the-key-of-the-tests"


@dataclass
class Pool:
    """Running servers, the model they were started with, and how to talk to them."""

    model: ModelConfig
    config: RolloutConfig
    servers: list[Server]
    scratch: Path
    version: int = 0

    def rollout(
        self, servers=None, sync=None, shared=None, warn=print_warning, spans=None, **settings
    ) -> Rollout:
        return Rollout(
            servers or self.servers,
            self.config.model_copy(update=settings),
            sync or SyncConfig(bucket_mb=1),
            self.model,
            disk_dir=self.scratch / "disk",
            seed=0,
            shared=shared,
            warn=warn,
            spans=spans,
        )

    def next_version(self) -> int:
        """A version that no earlier sync of the session used."""
        self.version += 1
        return self.version

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(Path(self.model.path) / "model.safetensors")

    def reference(self, weights: dict[str, torch.Tensor]):
        """The transformers model with these weights, in float32."""
        model = AutoModelForCausalLM.from_pretrained(self.model.path, dtype=torch.float32)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        return model.eval()


def launch_pool(model_path: Path, scratch: Path, dtype: str = "float32", **settings) -> Pool:
    config = RolloutConfig(
        start_timeout_s=START_TIMEOUT_S,
        request_timeout_s=60.0,
        server_args={
            "max_total_tokens": 8192,
            "max_running_requests": 64,
            "enable_metrics": True,
        },
        **settings,
    )
    model = ModelConfig(path=str(model_path), dtype=dtype)  # pyright: ignore[reportArgumentType]
    os.environ[API_KEY_VARIABLE] = API_KEY
    return Pool(model, config, launch_servers(config, model, scratch / "logs", "cpu"), scratch)


@pytest.fixture(scope="session")
def launched_qwen_pool(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("qwen_pool")
    pool = launch_pool(tiny_qwen3(scratch / "model"), scratch, servers=2)
    yield pool
    close_servers(pool.servers)


@pytest.fixture(scope="session")
def launched_llama_pool(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("llama_pool")
    pool = launch_pool(tiny_llama(scratch / "model"), scratch, tensor_parallel=2)
    yield pool
    close_servers(pool.servers)


@pytest.fixture(scope="session")
def both_launched(launched_qwen_pool, launched_llama_pool):
    """Starts all servers side by side, for modules that need both pools anyway."""


@pytest.fixture(scope="session")
def qwen_pool(launched_qwen_pool):
    """Two servers of a tied Qwen3, one rank each."""
    wait_healthy(launched_qwen_pool.servers, START_TIMEOUT_S)
    return launched_qwen_pool


@pytest.fixture(scope="session")
def llama_pool(launched_llama_pool):
    """One server of an untied Llama over two tensor-parallel ranks."""
    wait_healthy(launched_llama_pool.servers, START_TIMEOUT_S)
    return launched_llama_pool


def reference_logprobs(model, prompt: tuple[int, ...], response, temperature: float = 1.0):
    """[len(response)] logprobs of the response by transformers, from float32 logits."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor([list(response)]).T)[:, 0]


def perturbed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Distinct prompts of different lengths."""
    return [
        Prompt(f"p{i}", tuple(4 + (7 * i + j) % 90 for j in range(3 + i % 5)), "", "test", None)
        for i in range(first, first + count)
    ]


def ask(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(server.url + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def reported_versions(pool):
    return {ask(server, "/model_info")["weight_version"] for server in pool.servers}


def generate(rollout, version, count=6):
    return rollout.generate(
        prompts(count),
        samples_per_prompt=2,
        version=version,
        temperature=1.0,
        max_response_tokens=5,
    )


def assert_sampled_from(pool, rollout, weights, version):
    model = pool.reference(weights)
    servers = set()
    for group in generate(rollout, version):
        for one in group.samples:
            servers.add(one.server)
            expected = reference_logprobs(model, group.prompt.token_ids, one.response_ids)
            found = torch.tensor(one.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert len(servers) == len(rollout.serving)


def assert_refuses_then_recovers(pool, rollout, version):
    """`version` never became current; a complete sync puts everything right again."""
    assert rollout.needs_sync
    with pytest.raises(OnPolicyError, match="did not complete"):
        generate(rollout, version)
    weights = pool.weights()
    version = pool.next_version()
    mended = pool.rollout()
    mended.sync(iter(weights.items()), version)
    assert_sampled_from(pool, mended, weights, version)


# What the proxy does to one exchange: answer in the server's place, change the server's answer,
# or hang up.
Fault = Callable[[bytes], tuple[int, bytes]]
DROP = "drop"


@dataclass
class FaultyProxy:
    """Stands in front of one server. `plan(path, body)` gives the fault for a request, or None.

    `rewrite(path, body)` may change what is passed on to the server.
    """

    target: str
    plan: Callable[[str, dict], Any] = lambda path, body: None
    rewrite: Callable[[str, dict], dict] = lambda path, body: body
    seen: list[tuple[str, dict]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> "FaultyProxy":
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30)

    @property
    def server(self) -> Server:
        return Server("proxied server", self.url)

    def asked(self, path: str) -> int:
        """How often it was asked for `path`."""
        return sum(seen == path for seen, _ in self.seen)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(started))

    async def _run(self, started: threading.Event) -> None:
        self._done = asyncio.Event()
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession() as self._session:
            started.set()
            await self._done.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        path = request.path
        self.seen.append((path, body))
        fault = self.plan(path, body)
        if fault is DROP:
            request.transport.close()
            return web.Response()
        if isinstance(fault, tuple):
            return web.Response(status=fault[0], body=fault[1])
        body = self.rewrite(path, body)
        async with self._session.request(
            request.method,
            self.target + request.path_qs,
            json=body if raw else None,
            headers={"Authorization": f"Bearer {API_KEY}"},
        ) as answer:
            status, content = answer.status, await answer.read()
        if fault is not None:
            status, content = fault(content)
        return web.Response(status=status, body=content)
