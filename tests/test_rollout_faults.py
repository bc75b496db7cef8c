"""Servers that die or hang, for real: others take over, and they come back with the right weights.

The tests build on each other: what one kills starts again while the next one runs.
"""

import asyncio
import os
import signal
import time

import psutil
import pytest
import torch
from servers import assert_sampled_from, perturbed, prompts, reference_logprobs

from megatron_opo.errors import ServerError
from megatron_opo.recipe import SyncConfig
from megatron_opo.rollout import ServersLostError
from megatron_opo.rollout.health import find_answering

pytestmark = pytest.mark.usefixtures("both_launched")

G = 2
LENGTH = 400
LIMIT_S = 6.0


@pytest.fixture(scope="module")
def kept(qwen_pool):
    """A rollout that soon finds out what is wrong, and what it said."""
    said: list[str] = []
    rollout = qwen_pool.rollout(
        sync=SyncConfig(bucket_mb=1, timeout_s=LIMIT_S),
        health_every_s=1.0,
        health_timeout_s=LIMIT_S,
        max_restarts=20,
        retries=0,
        warn=said.append,
    )
    rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())
    yield rollout, said
    for server in qwen_pool.servers:
        bring_back(rollout, server)
    rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())


def bring_back(rollout, server) -> None:
    """Until `server` answers, whatever the others do."""
    deadline = time.monotonic() + 200
    while server not in asyncio.run(find_answering(rollout._keeper)):
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.2)


def scheduler_of(server) -> int:
    """The first process that the server's own one, the guard's child, starts to work for it."""
    (main,) = psutil.Process(server.process.pid).children()
    return min(p.pid for p in main.children())


def kill_all(server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)


def kill_scheduler(server) -> None:
    """As the kernel does when memory runs out."""
    os.kill(scheduler_of(server), signal.SIGKILL)


def stop_all(server) -> None:
    os.killpg(server.process.pid, signal.SIGSTOP)


def stop_scheduler(server) -> None:
    os.kill(scheduler_of(server), signal.SIGSTOP)


def once(action):
    """`action` at the first call, with whatever arguments."""
    calls: list[int] = []

    def act(*_) -> None:
        if not calls:
            calls.append(1)
            action()

    return act


def sample(pool, rollout, weights, version, on_group=lambda _: None):
    """Long responses to 12 prompts: each prompt once, in order, whole, by the weights and version
    that are wanted."""
    asked = prompts(12)
    groups = rollout.generate(
        asked,
        samples_per_prompt=G,
        version=version,
        temperature=1.0,
        max_response_tokens=LENGTH,
        on_group=on_group,
    )
    assert [group.prompt for group in groups] == asked
    model = pool.reference(weights)
    for group in groups:
        assert [s.index for s in group.samples] == list(range(G))
        for one in group.samples:
            assert one.group_id == group.prompt.id
            assert set(one.versions) == {version}
            expected = reference_logprobs(model, group.prompt.token_ids, one.response_ids)
            found = torch.tensor(one.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    return groups


def test_others_take_over_from_a_server_that_runs_out_of_memory(kept, qwen_pool):
    rollout, said = kept
    first, second = qwen_pool.servers
    weights, version = perturbed(qwen_pool.weights(), 31), qwen_pool.next_version()
    rollout.sync(iter(weights.items()), version)
    sample(qwen_pool, rollout, weights, version, once(lambda: kill_scheduler(first)))
    assert rollout.serving == [second]
    assert rollout.stats.retries >= 1
    assert f"server 0 ({first.url}) " in said[0]


def test_a_server_that_hangs_while_weights_are_sent_is_left_out(kept, qwen_pool):
    """All of its processes are stopped, while the other server is on its way back: that one alone
    is waited for."""
    rollout, said = kept
    second = qwen_pool.servers[1]
    weights, version = perturbed(qwen_pool.weights(), 32), qwen_pool.next_version()

    def stopping():
        for i, item in enumerate(weights.items()):
            if i == 10:
                stop_all(second)
            yield item

    start = time.monotonic()
    with pytest.raises(ServersLostError, match="server 1 lost while weights were sent"):
        rollout.sync(stopping(), version)
    assert time.monotonic() - start < 5 * LIMIT_S
    assert rollout.serving == []
    with pytest.raises(ServersLostError, match="no server holds the current weights"):
        sample(qwen_pool, rollout, weights, version)
    assert f"{second.url}) did not answer /server_info for 6 s\nIt is ended" in "".join(said)
    rollout.wait_for_one()
    rollout.sync(iter(weights.items()), version)
    assert len(rollout.serving) >= 1
    sample(qwen_pool, rollout, weights, version)
    assert rollout.restarts >= 1


def test_a_hanging_scheduler_is_found_and_its_prompts_go_to_others(kept, qwen_pool):
    """Its HTTP server still takes requests. Both servers were started again before; to give their
    memory back they must be up."""
    rollout, said = kept
    first, second = qwen_pool.servers
    weights, version = perturbed(qwen_pool.weights(), 33), qwen_pool.next_version()
    deadline = time.monotonic() + 60
    while rollout.restarts < 2:  # the pause before a start may not be over
        assert time.monotonic() < deadline
        asyncio.run(find_answering(rollout._keeper))
        time.sleep(0.2)
    rollout.release()
    rollout.sync(iter(weights.items()), version)
    assert rollout.serving == qwen_pool.servers
    assert_sampled_from(qwen_pool, rollout, weights, version)
    start = time.monotonic()
    sample(qwen_pool, rollout, weights, version, once(lambda: stop_scheduler(first)))
    assert time.monotonic() - start < 10 * LIMIT_S
    assert rollout.serving == [second]
    assert f"server 0 ({first.url}) did not answer /health for 6 s" in "".join(said)


def test_when_all_are_lost_the_end_is_clear(kept, qwen_pool):
    second = qwen_pool.servers[1]
    rollout = qwen_pool.rollout([second], max_restarts=0, health_every_s=1.0)
    weights, version = qwen_pool.weights(), qwen_pool.next_version()
    rollout.sync(iter(weights.items()), version)
    with pytest.raises(ServersLostError, match=r"server 1 .* (has ended|refuses connections)"):
        sample(qwen_pool, rollout, weights, version, once(lambda: kill_all(second)))
    with pytest.raises(ServerError, match=r"no server is left:\nserver 1 .* exited with code -9"):
        rollout.wait_for_one()
