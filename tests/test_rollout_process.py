"""Processes of servers: who starts, ends and starts them again, here and from another node. What
runs in them does not matter, so it is a shell that waits."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from test_rollout_server import members, wait_until

from megatron_opo.recipe import RolloutConfig
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout.keeper import Keeper
from megatron_opo.rollout.process import AGAIN, Server, close_servers, follow
from megatron_opo.rollout.server import guarded


@pytest.fixture
def launch(tmp_path):
    """`launch(script)` gives a server that runs it."""
    servers = []

    def make(script: str) -> Server:
        number = len(servers)
        server = Server(
            f"server {number}",
            "http://127.0.0.1:1",
            log=tmp_path / f"server_{number}.log",
            command=guarded(["sh", "-c", script, "sh"]),
            environment=os.environ | {API_KEY_VARIABLE: "key"},
        )
        server.launch()
        servers.append(server)
        return server

    yield make
    close_servers(servers)


def ended(server: Server) -> bool:
    return server.exit_code is not None


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_shared_memory_of_a_servers_name_goes_with_it(launch, end):
    """What was made since the guard's last look, by a process that is gone, too."""
    server = launch('touch "/dev/shm/made_$MEGATRON_OPO_SHARED_NAME"; exec sleep 100')
    pattern = f"made_opo_server_{server.process.pid}_*"
    wait_until(lambda: list(Path("/dev/shm").glob(pattern)))
    (made,) = Path("/dev/shm").glob(pattern)
    (inner,) = psutil.Process(server.process.pid).children()
    inner.send_signal(end)
    wait_until(lambda: ended(server))
    assert not made.exists()


def test_another_node_does_what_rank_0_wants_and_tells_of_the_end(launch):
    own = launch('echo started with "$@"; exec sleep 100')
    elsewhere = Server(own.name, own.url, log=own.log)
    wait_until(lambda: own.log.read_text().count("started with") == 1)
    assert not follow(own)
    assert elsewhere.exit_code is None
    os.killpg(own.process.pid, signal.SIGKILL)
    wait_until(lambda: ended(own))
    assert [follow(own), follow(own)] == [True, False], "it is told once"
    assert elsewhere.exit_code == own.exit_code == -9
    assert "server 0 (http://127.0.0.1:1) exited with code -9" in elsewhere.describe_exit()

    elsewhere.launch_again()
    assert elsewhere.exit_code is None, "a word about an earlier start"
    assert not follow(own)
    assert own.exit_code is None
    wait_until(lambda: own.log.read_text().count("started with") == 2)
    elsewhere.end()
    assert not follow(own)
    wait_until(lambda: ended(own))
    assert follow(own)
    assert elsewhere.exit_code == 128 + signal.SIGKILL
    assert not follow(own), "it is not started again before that is wanted"
    assert elsewhere.exit_code is not None

    elsewhere.launch_again()
    follow(own)
    follow(own)
    assert own.exit_code is None, "what was wanted of an earlier start does not end this one"
    wait_until(lambda: own.log.read_text().count("started with") == 3)
    log = own.log.read_text()
    assert log.count(f"started with {' '.join(AGAIN)} --config") == 2
    assert log.count("==== started again, 2") == 2


def test_a_server_ends_though_all_of_its_processes_are_stopped(launch):
    server = launch("sleep 100 & sleep 100")
    wait_until(lambda: len(members(server.process.pid)) == 4)
    os.killpg(server.process.pid, signal.SIGSTOP)
    server.end()
    wait_until(lambda: ended(server), 20.0)
    assert not members(server.process.pid)


def test_a_server_that_keeps_ending_is_started_again_later_and_later_and_not_for_ever(launch):
    said, at = [], []

    def warn(text: str) -> None:
        said.append(text)
        at.append(time.monotonic())

    broken, sound = launch("echo broken; exit 7"), launch("exec sleep 100")
    keeper = Keeper([broken, sound], RolloutConfig(max_restarts=2), "cpu", warn)
    assert keeper.serving == [broken, sound]
    deadline = time.monotonic() + 60
    while not keeper.is_over(broken):
        assert time.monotonic() < deadline, said
        keeper.look()
        time.sleep(0.01)
    assert keeper.serving == keeper.running == [sound]
    assert keeper.restarts == 2
    for text in said:
        assert "server 0 (http://127.0.0.1:1) exited with code 7" in text
        assert "\nbroken\n" in text
    ends = [text.splitlines()[-1] for text in said]
    assert ends == [
        "It is started again in 1 s (1 of rollout.max_restarts 2)",
        "It is started again in 2 s (2 of rollout.max_restarts 2)",
        "It is not started again (rollout.max_restarts is used up)",
    ]
    assert at[1] - at[0] > 1.0 and at[2] - at[1] > 2.0
    keeper.look()
    assert len(said) == 3


def test_a_server_that_hangs_is_ended_and_started_again(launch):
    said = []
    server = launch("trap '' TERM; while true; do sleep 1; done")
    keeper = Keeper([server], RolloutConfig(), "cpu", said.append)
    keeper.lose(server, "server 0 hangs", end=True)
    keeper.lose(server, "server 0 hangs", end=True)
    assert keeper.serving == keeper.running == []
    wait_until(lambda: keeper.look() or keeper.restarts == 1)
    assert server.exit_code is None
    assert keeper.running == [server] and keeper.serving == []
    hangs, again = said
    assert hangs.startswith("server 0 hangs\nIt is ended")
    assert "server 0 (http://127.0.0.1:1) has ended with code " in again
    assert "It is started again in 1 s (1 of rollout.max_restarts 5)" in again


def test_the_limits_of_health_depend_on_the_device():
    assert RolloutConfig().health_limit_s("cuda") == 30
    assert RolloutConfig().health_limit_s("cpu") == 120
    assert RolloutConfig(health_timeout_s=5).health_limit_s("cpu") == 5
