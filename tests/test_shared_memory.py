"""Weights that servers read from the trainer's memory, and memory that servers hand over."""

import inspect
import io
import os
import pickle
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from servers import DROP, FaultyProxy, assert_sampled_from, generate, perturbed, reported_versions
from torch.multiprocessing import reductions

from megatron_opo.desk import Desk
from megatron_opo.errors import OnPolicyError, OpoError, ServerError, WeightError
from megatron_opo.recipe import SyncConfig
from megatron_opo.rollout import Server, SharedBucket, shared_memory
from megatron_opo.rollout.buckets import Entry, messages
from megatron_opo.rollout.shared_memory import SHARED_MEMORY, Filled, allocate, share_one
from tests.actor_cases import _step, exported, open_actor
from tests.ranks import run_ranks

MIB = 2**20
CPU = torch.device("cpu")
SHARED = SyncConfig(transport="shared_memory")
UPDATE = "/update_weights_from_tensor"
# Number of a server, and which of the requests of a kind that it gets.
REFUSED = {(1, UPDATE, 3), (1, "/pause_generation", 2)}


def left_behind(pid: int) -> list[str]:
    """What torch has in shared memory for a process."""
    return [path.name for path in SHARED_MEMORY.glob(f"torch_{pid}_*")]


def test_servers_of_one_and_of_two_ranks_read_several_messages(qwen_pool, llama_pool):
    for pool, checksums in ((qwen_pool, 2 * (4 * 8 + 2)), (llama_pool, 2 * (4 * 6 + 3))):
        shared = share_one((MIB, MIB), CPU)
        rollout = pool.rollout(sync=SHARED, shared=shared)
        for seed in (1, 2):
            weights = perturbed(pool.weights(), seed)
            assert sum(t.nbytes for t in weights.values()) > 3 * MIB
            version = pool.next_version()
            stats = rollout.sync(iter(weights.items()), version)
            assert stats.bytes == sum(t.nbytes for t in weights.values())
            assert stats.tensors == len(weights)
            assert stats.checksums == checksums
            assert reported_versions(pool) == {str(version)}
        assert_sampled_from(pool, rollout, weights, version)
        shared.close()
    assert not left_behind(os.getpid())


def test_a_message_that_fails_leaves_servers_that_the_next_sync_puts_right(qwen_pool):
    """One server refuses the third message, which the other one still reads."""
    seen = []

    def plan(path, _):
        seen.append(path)
        fails = path == UPDATE and seen.count(UPDATE) == 3
        return (400, b'{"success": false, "message": "refused by the test"}') if fails else None

    shared, version = share_one((MIB, MIB), CPU), qwen_pool.next_version()
    with FaultyProxy(qwen_pool.servers[1].url, plan=plan) as proxy:
        rollout = qwen_pool.rollout(
            [qwen_pool.servers[0], proxy.server], sync=SHARED, shared=shared
        )
        weights = perturbed(qwen_pool.weights(), 3)
        with pytest.raises(ServerError, match="refused by the test"):
            rollout.sync(iter(weights.items()), version)
        assert reported_versions(qwen_pool) == {"updating"}
        version = qwen_pool.next_version()
        rollout.sync(iter(weights.items()), version)
        assert_sampled_from(qwen_pool, rollout, weights, version)
    shared.close()
    assert not left_behind(os.getpid()), "though a message was never read"


def test_released_servers_sample_again_only_from_new_weights(qwen_pool, llama_pool):
    for pool in (qwen_pool, llama_pool):
        shared, weights = share_one((MIB, MIB), CPU), perturbed(pool.weights(), 4)
        rollout = pool.rollout(sync=SHARED, shared=shared)
        rollout.sync(iter(pool.weights().items()), pool.next_version())
        rollout.release()
        rollout.release()
        assert rollout.needs_sync
        with pytest.raises(OnPolicyError, match="memory was released"):
            generate(rollout, pool.version)
        version = pool.next_version()
        rollout.sync(iter(weights.items()), version)
        assert_sampled_from(pool, rollout, weights, version)
        shared.close()


def test_memory_is_taken_back_once_though_the_sync_failed_after_that(qwen_pool):
    rollout = qwen_pool.rollout()
    rollout.release()
    broken = qwen_pool.weights()
    broken["model.norm.weight"][0] = torch.nan
    with pytest.raises(WeightError, match="not finite"):
        rollout.sync(iter(broken.items()), qwen_pool.next_version())
    with pytest.raises(OnPolicyError):
        generate(rollout, qwen_pool.version)
    weights, version = perturbed(qwen_pool.weights(), 5), qwen_pool.next_version()
    rollout.sync(iter(weights.items()), version)
    assert_sampled_from(qwen_pool, rollout, weights, version)


def sync_from_two_nodes(model: str, run_dir: str, servers: list[Server], versions: list[int]):
    """Ranks that are each on a node of their own, and hold half of the layers, give the servers
    their weights several times; how each time ended, and the weights."""
    from megatron_opo import train
    from megatron_opo.recipe_file import load_recipe
    from megatron_opo.rollout import Rollout
    from megatron_opo.weights.export import export_hf

    actor = open_actor(model, run_dir, ["actor.pipeline_parallel=2"])
    _step(actor)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    overrides = ["sync.transport=shared_memory", "sync.bucket_mb=1"]
    recipe = load_recipe(f"{run_dir}/recipe_{actor.parallel.rank}.yaml", overrides)
    shared = train.open_shared_bucket(recipe, actor.hf_config, actor.parallel)
    # So small that messages to servers and those between ranks take turns.
    train.export_hf = partial(export_hf, bucket_bytes=MIB // 4)
    rollout = Rollout(
        servers, recipe.rollout, recipe.sync, recipe.model, disk_dir=Path(run_dir), shared=shared
    )
    log = SimpleNamespace(phase=lambda name: nullcontext(), warn=print)
    desk = SimpleNamespace(rollout=rollout, log=log)
    desk.sync = partial(Desk.sync, desk)
    ends = []
    for version in versions:
        actor.version = version
        try:
            ends.append(train.sync(actor, desk, actor.driver, shared))
        except OpoError as error:
            ends.append(f"{type(error).__name__}: {error}")
    shared.close()
    return ends, exported(actor), left_behind(os.getpid())


def test_servers_on_two_nodes_read_the_memory_of_their_own_one(qwen_pool, tmp_path):
    """Before that one of them refuses first the third message, then to begin at all; in the end it
    answers nothing any more, and the other one is given the weights from the start."""
    asked, places, gone = Counter(), {0: set(), 1: set()}, []

    def watch(number, path, body):
        asked[number, path] += 1
        # The last question of a sync that went well; two do so before the last one.
        if (number, path) == (1, UPDATE) and asked[1, "/model_info"] == 2:
            gone.append(number)
        if number in gone:
            return DROP
        if path == UPDATE:
            places[number] |= {place_of(message) for message in body["serialized_named_tensors"]}
        if (number, path, asked[number, path]) in REFUSED:
            return 400, b'{"success": false, "message": "refused by the test"}'
        return None

    versions = [qwen_pool.next_version() for _ in range(5)]
    with (
        FaultyProxy(qwen_pool.servers[0].url, plan=partial(watch, 0)) as first,
        FaultyProxy(qwen_pool.servers[1].url, plan=partial(watch, 1)) as second,
    ):
        servers = [Server("server 0", first.url), Server("server 1", second.url, node=1)]
        run_dir = str(tmp_path / "run")
        (ends, weights, left), other = run_ranks(
            2, sync_from_two_nodes, qwen_pool.model.path, run_dir, servers, versions
        )
    for end, elsewhere in zip(ends[:2], other[0][:2], strict=True):
        assert end.startswith("ServerError: server 1")
        assert "refused by the test" in end
        assert elsewhere == f"DriverFailed: rank 0 failed: {end}"
    size = sum(array.nbytes for array in weights.values())
    assert [end["sync/bytes"] for end in ends[2:]] == [size] * 3
    assert other[0][2:] == [{}] * 3
    assert gone
    assert len(places[0]) == len(places[1]) == 1
    assert places[0] != places[1]
    assert left == other[2] == []
    rollout = qwen_pool.rollout(qwen_pool.servers[:1])
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    assert_sampled_from(qwen_pool, rollout, tensors, versions[-1])
    qwen_pool.rollout().sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())


def place_of(message: str) -> bytes:
    """The file in which the weights of a message are."""
    _, (_, typed, _) = unpickled(message)["flattened_tensor"]
    _, ((_, (_, _, file, _)), _) = typed
    return file


def unpickled(message: str):
    """What a message holds, with calls of torch's functions left as they are."""

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            if module == "torch.multiprocessing.reductions":
                return lambda *arguments: (name, arguments)
            return super().find_class(module, name)

    return Reader(io.BytesIO(b64decode(message))).load()


def test_a_buffer_on_a_gpu_is_opened_by_its_handle_and_the_gpus_own_name():
    """No GPU is needed: what torch would be called with there, by the names of its parameters."""
    signature = inspect.signature(reductions.rebuild_cuda_tensor)
    assert list(signature.parameters)[shared_memory.DEVICE_ARGUMENT] == "storage_device"
    handle, counter, event = b"handle", b"counter", b"event"
    kinds = torch.Tensor, torch.Size([900]), (1,), 0, torch.storage.TypedStorage, torch.uint8
    place = (*kinds, "GPU-7", handle, 900, 0, False, counter, 3, event, True)
    shared = SharedBucket((450, 450), None, [(), place], None)
    entries = [
        Entry("a", torch.bfloat16, (2, 3), 0, 12),
        Entry("b", torch.float32, (4,), 256, 272),
    ]
    content = unpickled(shared.message(1, Filled(entries, 450, 272)))
    name, arguments = content["flattened_tensor"]
    assert name == "rebuild_cuda_tensor"
    called = signature.bind(*arguments).arguments
    assert called["tensor_size"] == (272,)
    assert called["tensor_offset"] == 450
    assert called["tensor_stride"] == (1,)
    assert called["storage_device"] == "GPU-7"
    assert called["storage_handle"] == handle
    assert called["storage_size_bytes"] == 900
    assert [vars(each) for each in content["metadata"]] == [
        {"name": "a", "dtype": torch.bfloat16, "shape": (2, 3)}
        | {"start_idx": 0, "end_idx": 12, "numel": 12},
        {"name": "b", "dtype": torch.float32, "shape": (4,)}
        | {"start_idx": 256, "end_idx": 272, "numel": 16},
    ]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]))),
    st.sampled_from([1, 256]),
    st.booleans(),
)
def test_messages_hold_every_weight_once_aligned_and_shapes_alone_split_alike(
    kinds, alignment, larger_alone
):
    weights = {f"w{i}": torch.arange(n).to(dtype) for i, (n, dtype) in enumerate(kinds)}
    sizes = (600, 600) if larger_alone else (1200, 500)
    split = partial(messages, alignment=alignment, larger_alone=larger_alone)
    buffers = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    seen, places, before = [], [], None
    for message in split(iter(weights.items()), buffers):
        # The one before may still be on its way.
        for sent in filter(None, (before, message)):
            end = 0
            for entry in sent.entries:
                gap = entry.start - end
                assert entry.start % max(alignment, entry.dtype.itemsize) == 0
                assert 0 <= gap < alignment
                found = sent.data[entry.start : entry.end].view(entry.dtype).view(entry.shape)
                assert torch.equal(found, weights[entry.name])
                end = entry.end
            assert sent.data.numel() == end
            assert end <= sizes[0] or len(sent.entries) == 1
        seen += [entry.name for entry in message.entries]
        places.append(message.entries)
        before = message
    assert seen == list(weights)
    shapes = ((name, torch.empty_like(t, device="meta")) for name, t in weights.items())
    ghosts = split(shapes, [torch.empty_like(buffer, device="meta") for buffer in buffers])
    assert [ghost.entries for ghost in ghosts] == places


def test_a_weight_that_is_larger_than_a_buffer_is_named():
    buffers = torch.zeros(2400, dtype=torch.uint8).split(1200)
    with pytest.raises(WeightError, match=r"big: has 1204 bytes.*raise sync\.bucket_mb"):
        list(messages(iter([("big", torch.zeros(301))]), buffers, alignment=256))


def test_shared_memory_that_is_too_small_is_told_before_it_is_written_to():
    with pytest.raises(WeightError, match=r"/dev/shm has \d+ MiB free.*--shm-size"):
        allocate(2**50, CPU)


@pytest.mark.parametrize(
    "server",
    [Server("server 1", "http://127.0.0.1:1", node=1), Server("server 1", "http://192.0.2.1:1")],
    ids=["on a node without trainers", "given by its URL"],
)
def test_servers_that_share_no_memory_with_the_trainer_are_refused(server):
    shared = SharedBucket((1, 1), None, [()], None)
    with pytest.raises(ServerError, match=r"server 1 .* shares no memory .*; use distributed"):
        shared.check_reach([server], lambda url: "127.0.0.1" in url)


TRAINER = """
import sys, time, torch
from megatron_opo.rollout.shared_memory import share_one
shared = share_one((1024, 1024), torch.device("cpu"))
(filled,) = shared.fill(iter([("w", torch.zeros(10))]))
shared.publish(filled, readers=3)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed_leaves_no_memory_and_no_process_behind():
    """Also where a message was never read."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout and trainer.stderr
    assert trainer.stdout.readline() == "ready\n"
    assert left_behind(trainer.pid)
    trainer.kill()
    # Torch's process that cleans up has inherited this end: it is closed when that ends, too.
    trainer.communicate()
    assert not left_behind(trainer.pid)
