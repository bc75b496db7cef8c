"""Launching servers: options, failures that show their cause, and no orphans."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_qwen3

from megatron_opo import sglang_plugin
from megatron_opo.errors import ServerError
from megatron_opo.recipe import ModelConfig, RolloutConfig
from megatron_opo.rollout import Server, close_servers, launch_servers, wait_healthy
from megatron_opo.rollout.server import (
    command_line,
    cores_of_ranks,
    server_environment,
    server_options,
    unneeded_models,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(path=str(tiny_qwen3(tmp_path_factory.mktemp("model"))), dtype="float32")


def options(device="cpu", index=0, **settings):
    config = RolloutConfig(**settings)
    return server_options(config, ModelConfig(path="M", dtype="bfloat16"), device, index, 4321)


def test_options_have_sglangs_names():
    words = command_line({"max_total_tokens": 9, "sleep_on_idle": True, "lora_paths": ["a", "b"]})
    assert words == ["--max-total-tokens", "9", "--sleep-on-idle", "--lora-paths", "a", "b"]


names = st.from_regex(r"[a-z]+(_[a-z]+){0,3}", fullmatch=True)
values = st.none() | st.booleans() | st.integers() | st.lists(st.integers(), min_size=1, max_size=3)


@given(st.dictionaries(names, values, max_size=6))
def test_every_option_is_given_once_or_left_out(given_options):
    words = command_line(given_options)
    flags = [word for word in words if word.startswith("--")]
    kept = [name for name, value in given_options.items() if value is not None]
    kept = [name for name in kept if given_options[name] is not False]
    assert flags == ["--" + name.replace("_", "-") for name in kept]


def test_the_recipe_has_the_last_word():
    default = options()
    assert default["max_total_tokens"] == 65_536
    assert default["sleep_on_idle"] is True
    changed = options(server_args={"max_total_tokens": 7, "sleep_on_idle": False, "log_level": "x"})
    assert changed["max_total_tokens"] == 7
    assert "--sleep-on-idle" not in command_line(changed)
    assert changed["log_level"] == "x"


def test_servers_on_gpus_take_devices_of_their_own():
    assert [options("cuda", i, tensor_parallel=2)["base_gpu_id"] for i in range(3)] == [0, 2, 4]
    assert "attention_backend" not in options("cuda")


def test_sampling_is_reproducible_where_that_is_free(model):
    for device, deterministic, expected in (
        ("cpu", None, True),
        ("cpu", False, False),
        ("cuda", None, False),
        ("cuda", True, True),
    ):
        config = RolloutConfig(deterministic=deterministic)
        assert config.is_deterministic(device) is expected
        flag = options(device, deterministic=deterministic).get("enable_deterministic_inference")
        assert bool(flag) is expected
        # The plugin is for CPUs; on GPUs SGLang has operations of its own.
        asked = sglang_plugin.VARIABLE in server_environment(config, model, device)
        assert asked is (expected and device == "cpu")


@pytest.mark.parametrize(
    ("cores", "limit", "servers", "tensor_parallel", "expected"),
    [
        (2, None, 1, 1, [("0,1", 2)]),
        (8, None, 2, 1, [("0,1,2,3", 4), ("4,5,6,7", 4)]),
        (8, "2", 2, 2, [("0,1|2,3", 2), ("4,5|6,7", 2)]),
        (8, "16", 1, 4, [("0,1|2,3|4,5|6,7", 2)]),
        (2, "1", 1, 1, [("0", 1)]),
        (2, "many", 3, 1, [("0", 1), ("1", 1), ("0", 1)]),
    ],
)
def test_servers_on_cpus_share_the_cores(
    monkeypatch, cores, limit, servers, tensor_parallel, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    config = RolloutConfig(servers=servers, tensor_parallel=tensor_parallel)
    assert [cores_of_ranks(config, i) for i in range(servers)] == expected


def test_an_environment_without_the_plugin_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_plugin, "entry_points", lambda group: ())
    with pytest.raises(ServerError, match="make setup"):
        launch_servers(RolloutConfig(), model, tmp_path, "cpu")


def test_only_servers_that_share_gpus_with_the_trainer_can_release_their_memory():
    assert options("cuda")["enable_memory_saver"] is True
    assert options("cuda", nodes=1)["enable_memory_saver"] is False
    assert options("cuda", hand_over_memory=False)["enable_memory_saver"] is False
    # There it would need a package for CUDA; the requests are answered all the same.
    assert "enable_memory_saver" not in options("cpu", hand_over_memory=True)


def test_the_trainers_rendezvous_is_not_inherited(model, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/kept")
    environment = server_environment(RolloutConfig(server_env={"SGLANG_X": "y"}), model, "cpu")
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(
        environment
    )
    assert environment["HF_HOME"] == "/kept"
    assert environment["SGLANG_X"] == "y"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(RolloutConfig(), model, "cuda")


def test_of_sglangs_models_only_the_one_that_is_served_is_imported(model, tmp_path):
    unneeded = unneeded_models(model.path)
    assert "qwen3" not in unneeded and {"llama", "deepseek_v2"} < set(unneeded)
    (tmp_path / "config.json").write_text('{"architectures": ["OfNobodyForCausalLM"]}')
    assert unneeded_models(str(tmp_path)) == []


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ServerError, match=r"model\.path: .*nowhere has no config\.json"):
        launch_servers(
            RolloutConfig(), ModelConfig(path=str(tmp_path / "nowhere")), tmp_path, "cpu"
        )


def test_a_taken_port_is_named(tmp_path, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"server 0.*127\.0\.0\.1:{port}.*in use.*port"):
            launch_servers(RolloutConfig(port=port), model, tmp_path, "cpu")


def test_servers_given_by_url_are_used_and_not_launched(tmp_path):
    config = RolloutConfig(urls=("http://a:1/", "http://b:2"))
    servers = launch_servers(config, ModelConfig(path=str(tmp_path)), tmp_path, "cpu")
    assert [server.url for server in servers] == ["http://a:1", "http://b:2"]
    assert not any(server.launched for server in servers)
    close_servers(servers)


def test_a_url_that_does_not_answer_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        waits = []
        with pytest.raises(ServerError, match=rf"{url}.*within 1 s.*rollout\.urls"):
            wait_healthy([Server("server 0", url)], 1.0, lambda *seen: waits.append(seen))
    assert waits[0][0].url == url


def test_a_server_that_dies_at_start_shows_its_log(tmp_path, model):
    config = RolloutConfig(server_args={"attention_backend": "no_such_backend"})
    servers = launch_servers(config, model, tmp_path / "logs", "cpu")
    try:
        with pytest.raises(ServerError) as caught:
            wait_healthy(servers, 120.0)
    finally:
        close_servers(servers)
    text = str(caught.value)
    assert f"server 0 ({servers[0].url}) exited with code 2" in text
    assert "invalid choice: 'no_such_backend'" in text
    assert str(tmp_path / "logs" / "server_0.log") in text


def test_a_server_that_is_too_slow_is_named_and_can_be_closed_twice(tmp_path, model):
    servers = launch_servers(RolloutConfig(), model, tmp_path, "cpu")
    waits = []
    try:
        with pytest.raises(ServerError, match=r"still runs.*within 2 s.*start_timeout_s"):
            wait_healthy(servers, 2.0, lambda *seen: waits.append(seen))
        assert servers[0].exit_code is None
        # Nobody else got its port in the meantime.
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", int(servers[0].url.rpartition(":")[2])))
    finally:
        close_servers(servers)
    assert servers[0].exit_code is not None
    wait_until(lambda: not members(servers[0].process.pid), 30.0)
    servers[0].close()
    assert [server for server, _, _ in waits] == servers * len(waits)
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(waits)]
    assert waits[0][1] >= 0.9
    assert all(gap >= 0.9 for gap in gaps)


TRAINER = """
import sys
from pathlib import Path
from megatron_opo.recipe import ModelConfig, RolloutConfig
from megatron_opo.rollout import launch_servers

model = ModelConfig(path=sys.argv[1], dtype="float32")
rollout = RolloutConfig(server_env={"MEGATRON_OPO_QUICK": sys.argv[3]})
servers = launch_servers(rollout, model, Path(sys.argv[2]), "cpu")
print(servers[0].process.pid, flush=True)
sys.stdin.read()
"""


def wait_until(condition, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def shared_files(server: int) -> set[str]:
    """Names in shared memory of what the server's processes have mapped, semaphores too."""
    inodes = set()
    for process in members(server):
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def own_directories(server: int, *places: Path) -> list[Path]:
    """Temporary directories of a server, wherever they may be."""
    return [found for p in (*places, Path("/tmp")) for found in p.glob(f"opo_server_{server}_*")]


def cancel(processes: list[psutil.Process]) -> None:
    """As Slurm does, which gives longer by default."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        time.sleep(2.0)


# At 2 processes the server itself has started, beside its guard; at 4 its scheduler and its
# detokenizer have too. At 5 they were not forked, as on GPUs: one more looks after semaphores, and
# they have not yet asked the kernel to die with it.
@pytest.mark.parametrize(
    ("end", "processes"),
    [(signal.SIGKILL, 2), (signal.SIGKILL, 5), ("cancel", 4), ("exit", 4)],
)
def test_nothing_of_a_server_outlives_its_trainer(tmp_path, model, end, processes):
    # One that is too long for the sockets of a server, and one that is not.
    if end == "exit":
        scratch = tmp_path / ("scratch" * 10)
        scratch.mkdir()
    else:
        scratch = Path(tempfile.mkdtemp(prefix="t"))
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, model.path, str(tmp_path), "" if processes == 5 else "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    server = int(trainer.stdout.readline())
    shared = set()
    try:
        wait_until(lambda: len(members(server)) >= processes)
        if processes > 2:
            what = "sem" if processes == 5 else f"opo_server_{server}_"
            wait_until(lambda: any(what in path for path in shared_files(server)))
            shared = shared_files(server)
            assert own_directories(server, scratch)
        if end == "exit":
            trainer.communicate("")
        elif end == "cancel":
            cancel([psutil.Process(trainer.pid), *members(server)])
        else:
            trainer.send_signal(end)
        trainer.wait(30)
        wait_until(lambda: not members(server), 30.0)
        assert [path for path in shared if os.path.exists(path)] == []
        if end != "cancel":  # sockets there are in use to the end
            assert own_directories(server, scratch) == []
            assert list(scratch.iterdir()) == []
    finally:
        shutil.rmtree(scratch)
        trainer.kill()
        trainer.communicate()
        for process in members(server):
            process.kill()


def test_a_server_ends_with_its_guard(tmp_path, model):
    (server,) = launch_servers(RolloutConfig(), model, tmp_path, "cpu")
    wait_until(lambda: len(members(server.process.pid)) >= 2)
    server.process.kill()
    wait_until(lambda: not members(server.process.pid), 30.0)
    assert server.exit_code == -signal.SIGKILL
    server.close()
