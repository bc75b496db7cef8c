"""SGLang servers as processes: launch, wait until they answer, and never leave one behind."""

import asyncio
import atexit
import importlib.util
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from megatron_opo import sglang_plugin
from megatron_opo.errors import ServerError
from megatron_opo.ports import claim_port
from megatron_opo.recipe import ModelConfig, RolloutConfig
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout import guard
from megatron_opo.rollout.process import Server

HEALTH_ANSWER_S = 30.0
SPINS = "1000"  # some microseconds

# Set by the launcher of a job of several nodes: name, url, log and node of every server of the job.
SERVERS_VARIABLE = "MEGATRON_OPO_SERVERS"
# Set by torchrun or srun for the trainer; a server that inherits them would look for the
# trainer's rendezvous instead of making its own.
TRAINER_ENVIRONMENT = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    SERVERS_VARIABLE,
)
TRAINER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def launch_servers(
    rollout: RolloutConfig, model: ModelConfig, log_dir: Path, device: str, first: int = 0
) -> list[Server]:
    """Start the servers of a recipe and return at once; `wait_healthy` waits for them.

    Call it from a thread that lives as long as the servers shall: Linux ties a child's life to
    the thread that started it.

    Args:
        log_dir: each server's output goes to server_<i>.log in it.
        device: "cpu", or "cuda" with `rollout.tensor_parallel` devices for each server.
        first: number of the first one, where other nodes have some, too.

    Raises:
        ServerError: the model directory does not exist, a port is taken, or this package is only
            half installed.
    """
    key = api_key()
    if rollout.urls:
        return [
            Server(f"server {i}", url.rstrip("/"), api_key=key)
            for i, url in enumerate(rollout.urls)
        ]
    if described := os.environ.get(SERVERS_VARIABLE):
        return [
            Server(each["name"], each["url"], log=Path(each["log"]), node=each["node"], api_key=key)
            for each in json.loads(described)
        ]
    if not (Path(model.path) / "config.json").is_file():
        raise ServerError(
            f"model.path: {model.path} has no config.json, so no server can be started; give a "
            "Hugging Face model directory (config.json, *.safetensors, tokenizer files)"
        )
    if device == "cpu" and rollout.is_deterministic(device) and not sglang_plugin.is_installed():
        raise ServerError(
            "rollout.deterministic: on a CPU it needs a plugin of SGLang that comes with this "
            "package, but the environment was set up by a version that had none; run `make setup` "
            "(pip install --no-deps --no-build-isolation --editable .), or set it to false"
        )
    log_dir.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    claims = [_claim(rollout, i) for i in range(rollout.servers)]
    for i, claim in enumerate(claims):
        port = claim.getsockname()[1]
        command = [sys.executable, "-P", "-m", "sglang.launch_server"]
        command += command_line(server_options(rollout, model, device, i, port))
        server = Server(
            f"server {first + i}",
            f"http://{rollout.host}:{port}",
            log=log_dir / f"server_{first + i}.log",
            api_key=key,
            command=guarded(command),
            environment=server_environment(rollout, model, device, i) | {API_KEY_VARIABLE: key},
            claim=claim,
        )
        server.launch()
        atexit.register(server.close)
        servers.append(server)
    return servers


def guarded(command: Sequence[str]) -> list[str]:
    """The command of the guard that runs `command`, and that ends with this process."""
    return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command]


def api_key() -> str:
    """That of the environment, or a new one.

    Raises:
        ServerError: it holds what no HTTP header or command line can.
    """
    key = os.environ.get(API_KEY_VARIABLE) or secrets.token_hex(32)
    if not re.fullmatch(r"[\w.~+/=][\w.~+/=-]*", key, re.ASCII):
        raise ServerError(
            f"{API_KEY_VARIABLE}: a key is made of letters, digits and . _ ~ + / = - (not first)"
        )
    return key


def _claim(rollout: RolloutConfig, index: int) -> socket.socket:
    port = rollout.port + index if rollout.port else 0
    try:
        return claim_port(rollout.host, port)
    except OSError as error:
        raise ServerError(
            f"server {index}: cannot listen on {rollout.host}:{port}: {error.strerror}. "
            "Stop what uses the port, or choose another with rollout.port (0: a free one)"
        ) from None


def server_options(
    rollout: RolloutConfig, model: ModelConfig, device: str, index: int, port: int
) -> dict[str, Any]:
    """SGLang's options for one server; `rollout.server_args` has the last word."""
    options: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "host": rollout.host,
        "port": port,
        "tp_size": rollout.tensor_parallel,
        "weight_version": "0",
        "sleep_on_idle": True,
        "skip_server_warmup": True,
    }
    if rollout.is_deterministic(device):
        options["enable_deterministic_inference"] = True
    if device == "cpu":
        options |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
            # Left alone, SGLang reserves most of the machine's memory for its cache.
            "max_total_tokens": 65_536,
            "max_running_requests": 256,
        }
    else:
        options["base_gpu_id"] = index * rollout.tensor_parallel
        options["enable_memory_saver"] = rollout.hands_over(device)
    return options | rollout.server_args


def command_line(options: dict[str, Any]) -> list[str]:
    """{"max_total_tokens": 9, "sleep_on_idle": True} -> --max-total-tokens 9 --sleep-on-idle.

    False and None leave an option out; a list or a tuple gives it several values.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            words += [str(v) for v in values]
    return words


def server_environment(
    rollout: RolloutConfig, model: ModelConfig, device: str, index: int = 0
) -> dict[str, str]:
    """The environment of a server: the trainer's without its rendezvous, and server_env."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TRAINER_ENVIRONMENT and not name.startswith(TRAINER_PREFIXES)
    }
    if device == "cpu":
        binding, threads = cores_of_ranks(rollout, index)
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": binding,
            "OMP_NUM_THREADS": str(threads),
            # Memory that weights came in is kept for the next ones: to get it from the system anew,
            # page by page, takes as long as to receive them.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
            # Left alone, a thread that waits for the others of a product spins for milliseconds: on
            # the core that another server, or the sender of weights, would use.
            "GOMP_SPINCOUNT": SPINS,
            # A CUDA build of torch brings NCCL along, which SGLang would use without any GPU.
            "SGLANG_NCCL_SO_PATH": "none: the servers run on a CPU",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(unneeded_models(model.path)),
            sglang_plugin.QUICK_VARIABLE: "1",
        }
        if rollout.is_deterministic(device):
            environment[sglang_plugin.VARIABLE] = "1"
    return environment | rollout.server_env


def cores_of_ranks(rollout: RolloutConfig, index: int) -> tuple[str, int]:
    """The cores of each rank of a server as SGLang wants them named, and the number of threads of
    each: the trainer is idle while servers generate, so they share all cores among them. A trainer
    that is limited by OMP_NUM_THREADS limits them, too."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = rollout.tensor_parallel
    threads = max(1, len(cores) // (rollout.servers * ranks))
    with suppress(KeyError, ValueError):
        threads = min(threads, max(1, int(os.environ["OMP_NUM_THREADS"])))
    blocks = [
        ",".join(str(cores[(rank * threads + i) % len(cores)]) for i in range(threads))
        for rank in range(index * ranks, (index + 1) * ranks)
    ]
    return "|".join(blocks), threads


def unneeded_models(model_path: str) -> list[str]:
    """SGLang's modules of models but those that define the model's class: to import all of them
    takes as long as the rest of a server's start. None where no module does."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    wanted = [f"\nclass {name}(" for name in config.get("architectures") or ()]
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return []
    modules = list((Path(package.origin).parent / "srt" / "models").glob("*.py"))
    needed = [path for path in modules if any(text in path.read_text() for text in wanted)]
    return sorted(path.stem for path in modules if path not in needed) if needed else []


def wait_healthy(
    servers: Sequence[Server],
    timeout_s: float,
    on_wait: Callable[[Server, float, str], None] | None = None,
) -> None:
    """Return when every server answers.

    Args:
        on_wait: called about once a second for each server that does not answer yet, with the
            seconds waited so far and the last line of its log.

    Raises:
        ServerError: a server exited, or did not answer within `timeout_s` seconds.
    """
    asyncio.run(_wait_healthy(servers, timeout_s, on_wait))


async def _wait_healthy(servers, timeout_s, on_wait) -> None:
    start = time.monotonic()
    async with aiohttp.ClientSession() as session:
        polls = {asyncio.create_task(_poll(session, server)): server for server in servers}
        waiting = set(polls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                seconds = time.monotonic() - start
                for task in waiting:
                    server = polls[task]
                    if on_wait is not None:
                        on_wait(server, seconds, server.log_tail(1))
                    if seconds > timeout_s:
                        raise ServerError(_too_slow(server, timeout_s))
        finally:
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)


async def _poll(session: aiohttp.ClientSession, server: Server) -> None:
    # /health samples a token, which a server that an earlier trainer left paused cannot do;
    # such a server is of use all the same, as the first weight update resumes it.
    path = "/health" if server.launched else "/model_info"
    timeout = aiohttp.ClientTimeout(total=HEALTH_ANSWER_S)
    while True:
        if server.exit_code is not None:
            raise ServerError(server.describe_exit())
        with suppress(aiohttp.ClientError, TimeoutError):
            url, headers = server.url + path, server.headers
            async with session.get(url, headers=headers, timeout=timeout) as answer:
                if answer.status == 200 and server.exit_code is None:
                    return
        await asyncio.sleep(0.3)


def _too_slow(server: Server, timeout_s: float) -> str:
    if not server.launched:
        return (
            f"{server.name} ({server.url}) did not answer within {timeout_s:.0f} s; check that it "
            "runs and that rollout.urls names it rightly, or raise rollout.start_timeout_s"
        )
    return (
        f"{server.name} ({server.url}) still runs but did not become healthy within "
        f"{timeout_s:.0f} s; raise rollout.start_timeout_s if it only needs longer. The last "
        f"lines of its log {server.log}:\n{server.log_tail()}"
    )
