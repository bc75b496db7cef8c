"""Weights sent to real servers: they arrive exactly, and nothing half-done is ever sampled."""

import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from servers import (
    DROP,
    FaultyProxy,
    ask,
    assert_refuses_then_recovers,
    assert_sampled_from,
    generate,
    perturbed,
    reference_logprobs,
    reported_versions,
)
from transformers import AutoModelForCausalLM

from megatron_opo.errors import OnPolicyError, ServerError, WeightError
from megatron_opo.recipe import SyncConfig
from megatron_opo.rollout import ServersLostError
from megatron_opo.rollout.buckets import buckets, sendable
from megatron_opo.rollout.checksum import ExpectedChecksums, hash_cpu, hash_cuda
from megatron_opo.rollout.group import address_towards
from megatron_opo.rollout.shared_memory import share_one
from megatron_opo.rollout.sync import AHEAD
from megatron_opo.spans import Spans

NORM_0 = "model.layers.0.input_layernorm.weight"
NORM_1 = "model.layers.1.input_layernorm.weight"

pytestmark = pytest.mark.usefixtures("both_launched")


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_new_weights_are_sampled_from_at_once(qwen_pool, transport):
    spans = Spans()
    rollout = qwen_pool.rollout(sync=SyncConfig(transport=transport, bucket_mb=1), spans=spans)
    for seed in (1, 2):
        weights = perturbed(qwen_pool.weights(), seed)
        version = qwen_pool.next_version()
        spans.take()
        with spans.of("sync"):
            stats = rollout.sync(iter(weights.items()), version)
        check_spans(spans.take(), qwen_pool, first=seed == 1, on_disk=transport == "disk")
        assert stats.tensors == len(weights)
        assert stats.bytes == sum(t.nbytes for t in weights.values())
        # Per server: 4 layers of 8 fused parameters, the embedding and the last norm.
        assert stats.checksums == 2 * (4 * 8 + 2)
        assert reported_versions(qwen_pool) == {str(version)}
        assert_sampled_from(qwen_pool, rollout, weights, version)
    kept = [d.name for d in (qwen_pool.scratch / "disk" / "weights").glob("*")]
    assert kept == ([f"version_{version}"] if transport == "disk" else [])


def check_spans(stretch, pool, first, on_disk):
    """All of it has a name, and each server's requests are on a track of its own."""
    seconds = stretch.seconds()
    parts = {path for path in seconds if path.count("/") == 1}
    names = {"look", "open", "send", "verify", "close", "unaccounted"}
    names |= {"write"} if on_disk else {"begin", "gather", "end"} | ({"join"} if first else set())
    assert parts == {f"sync/{name}" for name in names}
    assert ("sync/write/gather" in seconds) == on_disk
    tracks = {span.track for span in stretch.spans} - {""}
    assert tracks == {s.name for s in pool.servers} | (set() if on_disk else {AHEAD})
    load = "/update_weights_from_" + ("disk" if on_disk else "distributed")
    for server in pool.servers:
        asked = [span.path for span in stretch.spans if span.track == server.name]
        assert asked[0] == ("/server_info" if first else "/pause_generation")
        assert asked[-1] == "/continue_generation"
        assert load in asked


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_two_ranks_get_their_shards(llama_pool, transport):
    rollout = llama_pool.rollout(sync=SyncConfig(transport=transport, bucket_mb=1))
    weights = perturbed(llama_pool.weights(), 3)
    version = llama_pool.next_version()
    # Per rank: 4 layers of 6, embedding, head and the last norm.
    assert rollout.sync(iter(weights.items()), version).checksums == 2 * (4 * 6 + 3)
    assert_sampled_from(llama_pool, rollout, weights, version)


def test_wider_weights_are_cast_before_they_are_hashed(qwen_pool):
    weights = {name: tensor.double() for name, tensor in qwen_pool.weights().items()}
    version = qwen_pool.next_version()
    assert qwen_pool.rollout().sync(iter(weights.items()), version).checksums > 0


@pytest.mark.parametrize("with_world", [True, False])
def test_the_trainers_own_process_group_is_left_alone(qwen_pool, with_world):
    weights = qwen_pool.weights()
    rollout = qwen_pool.rollout()
    if not with_world:
        rollout.sync(iter(weights.items()), qwen_pool.next_version())
        assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rollout.sync(iter(weights.items()), qwen_pool.next_version())
        total = torch.ones(3)
        dist.all_reduce(total)
        assert dist.get_world_size() == 1
        assert torch.equal(dist.distributed_c10d._get_default_group().size() * total, total)
    finally:
        dist.destroy_process_group()
    rollout.sync(iter(weights.items()), qwen_pool.next_version())
    # What each server has imported is there to stay; it is told so once.
    asked = [span.track for span in rollout._spans.done if span.path == "/freeze_gc"]
    assert sorted(asked) == sorted(server.name for server in qwen_pool.servers)


def swap_norms(path, body):
    if path == "/update_weights_from_distributed":
        other = {NORM_0: NORM_1, NORM_1: NORM_0}
        body = body | {"names": [other.get(name, name) for name in body["names"]]}
    return body


def test_a_wrong_tensor_is_found_by_its_checksum(qwen_pool):
    """Two layers' norms change places on the way: nothing else could tell."""
    weights = perturbed(qwen_pool.weights(), 4)
    version = qwen_pool.next_version()
    with FaultyProxy(qwen_pool.servers[0].url, rewrite=swap_norms) as proxy:
        rollout = qwen_pool.rollout([proxy.server, qwen_pool.servers[1]])
        with pytest.raises(WeightError) as caught:
            rollout.sync(iter(weights.items()), version)
        assert not any(path == "/continue_generation" for path, _ in proxy.seen)
    text = str(caught.value)
    assert proxy.url in text
    assert "2 of 34 weights" in text
    (found,) = ask(qwen_pool.servers[0], "/weights_checker", {"action": "checksum"})["ranks"]
    for name, other in ((NORM_0, NORM_1), (NORM_1, NORM_0)):
        assert found["checksums"][name] == hash_cpu([weights[other]])
        assert (
            f"{name}: sent {hash_cpu([weights[name]])}, server holds {hash_cpu([weights[other]])}"
            in text
        )
    assert reported_versions(qwen_pool) == {"updating"}
    assert_refuses_then_recovers(qwen_pool, rollout, version)


def test_without_verification_the_same_fault_passes(qwen_pool):
    """Shows that it is the checksum that finds it; and what sync.verify=false gives up."""
    weights = perturbed(qwen_pool.weights(), 4)
    version = qwen_pool.next_version()
    with FaultyProxy(qwen_pool.servers[0].url, rewrite=swap_norms) as proxy:
        rollout = qwen_pool.rollout([proxy.server], sync=SyncConfig(verify=False))
        assert rollout.sync(iter(weights.items()), version).checksums == 0


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_a_weight_that_was_never_sent_is_named(qwen_pool, transport):
    weights = perturbed(qwen_pool.weights(), 6)
    del weights[NORM_1]
    rollout = qwen_pool.rollout(sync=SyncConfig(transport=transport))
    version = qwen_pool.next_version()
    with pytest.raises(WeightError, match=f"{NORM_1}: there, but never sent"):
        rollout.sync(iter(weights.items()), version)
    assert_refuses_then_recovers(qwen_pool, rollout, version)


def test_a_weight_the_server_does_not_know_is_named(qwen_pool):
    weights = qwen_pool.weights() | {"model.layers.0.extra.weight": torch.zeros(4)}
    rollout = qwen_pool.rollout()
    with pytest.raises(WeightError, match=r"model\.layers\.0\.extra\.weight: sent, but no such"):
        rollout.sync(iter(weights.items()), qwen_pool.next_version())


def test_half_of_a_fused_weight_is_named(qwen_pool):
    weights = qwen_pool.weights()
    del weights["model.layers.2.mlp.up_proj.weight"]
    rollout = qwen_pool.rollout()
    with pytest.raises(WeightError, match=r"made of gate_proj, up_proj, but only gate_proj"):
        rollout.sync(iter(weights.items()), qwen_pool.next_version())


def test_a_head_that_is_not_the_tied_embedding_is_refused(qwen_pool):
    weights = qwen_pool.weights()
    tied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    rollout = qwen_pool.rollout()
    rollout.sync(iter(tied.items()), qwen_pool.next_version())
    untied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    with pytest.raises(WeightError, match="ties lm_head"):
        rollout.sync(iter(untied.items()), qwen_pool.next_version())


@pytest.mark.parametrize(
    "path",
    [
        "/server_info",
        "/pause_generation",
        "/flush_cache",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/weights_checker",
        "/model_info",
        "/continue_generation",
    ],
)
def test_a_step_that_fails_leaves_nothing_to_sample_from(qwen_pool, path):
    """Each step refused by one of two servers; the other went on or not, it makes no difference."""
    fault = (400, b'{"success": false, "message": "refused by the test"}')
    version = qwen_pool.next_version()
    with FaultyProxy(
        qwen_pool.servers[1].url, plan=lambda got, _: fault if got == path else None
    ) as proxy:
        rollout = qwen_pool.rollout([qwen_pool.servers[0], proxy.server], request_timeout_s=10.0)
        with pytest.raises(ServerError, match="refused by the test") as caught:
            rollout.sync(iter(perturbed(qwen_pool.weights(), 7).items()), version)
    assert path in str(caught.value)
    assert proxy.url in str(caught.value)
    assert_refuses_then_recovers(qwen_pool, rollout, version)


MESSAGES = {
    "distributed": "/update_weights_from_distributed",
    "shared_memory": "/update_weights_from_tensor",
    "disk": "/update_weights_from_disk",
}


@pytest.mark.parametrize("transport", MESSAGES)
def test_a_server_that_is_lost_on_the_way_is_left_out_and_comes_back(qwen_pool, transport):
    """It answers nothing any more from the first or second message on."""
    shared = (
        share_one((2**20, 2**20), torch.device("cpu")) if transport == "shared_memory" else None
    )
    messages = []

    def vanish(path, _):
        messages.extend([path] * (path == MESSAGES[transport]))
        return DROP if len(messages) > (transport != "disk") else None

    with FaultyProxy(qwen_pool.servers[0].url, plan=vanish) as proxy:
        second = qwen_pool.servers[1]
        rollout = qwen_pool.rollout(
            [proxy.server, second],
            sync=SyncConfig(transport=transport, bucket_mb=1, timeout_s=10),
            shared=shared,
        )
        weights, version = perturbed(qwen_pool.weights(), 12), qwen_pool.next_version()
        with pytest.raises(ServersLostError, match="proxied server lost while weights were sent"):
            rollout.sync(iter(weights.items()), version)
        assert rollout.serving == [second]
        with pytest.raises(OnPolicyError, match="did not complete"):
            generate(rollout, version)
        rollout.sync(iter(weights.items()), version)
        assert rollout.serving == [second]
        assert_sampled_from(qwen_pool, rollout, weights, version)
        proxy.plan = lambda *_: None
        weights, version = perturbed(qwen_pool.weights(), 13), qwen_pool.next_version()
        rollout.sync(iter(weights.items()), version)
        assert rollout.serving == rollout.servers
        assert_sampled_from(qwen_pool, rollout, weights, version)
    if shared is not None:
        shared.close()


def test_a_failed_flush_says_so(qwen_pool):
    """SGLang refuses to flush with a plain text and status 400."""
    fault = (400, b"Flush cache failed.\n")
    with FaultyProxy(
        qwen_pool.servers[0].url, plan=lambda path, _: fault if path == "/flush_cache" else None
    ) as proxy:
        rollout = qwen_pool.rollout([proxy.server])
        with pytest.raises(ServerError, match=r"/flush_cache.*status 400: Flush cache failed"):
            rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())
        assert not any(path == "/begin_weight_update" for path, _ in proxy.seen)


def test_an_exporter_that_fails_half_way_leaves_nothing_to_sample_from(qwen_pool):
    def half():
        yield from list(perturbed(qwen_pool.weights(), 8).items())[:20]
        raise RuntimeError("a trainer rank died")

    rollout = qwen_pool.rollout()
    version = qwen_pool.next_version()
    with pytest.raises(RuntimeError, match="a trainer rank died"):
        rollout.sync(half(), version)
    assert reported_versions(qwen_pool) == {"updating"}
    assert_refuses_then_recovers(qwen_pool, rollout, version)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_sent(qwen_pool, value):
    weights = qwen_pool.weights()
    weights[NORM_1][3] = value
    rollout = qwen_pool.rollout()
    version = qwen_pool.next_version()
    with pytest.raises(WeightError, match=f"{NORM_1}: holds values that are not finite"):
        rollout.sync(iter(weights.items()), version)
    assert rollout.needs_sync


def test_an_unwritable_directory_is_named(qwen_pool, tmp_path):
    (tmp_path / "disk").write_text("a file where the directory should be")
    rollout = replace(qwen_pool, scratch=tmp_path).rollout(sync=SyncConfig(transport="disk"))
    with pytest.raises(WeightError, match=r"sync\.transport is disk, but .*version_\d+ cannot"):
        rollout.sync(iter(qwen_pool.weights().items()), qwen_pool.next_version())


def test_leave_the_pools_as_they_were(qwen_pool, llama_pool):
    """A healthy end for whoever uses the servers next, after all the faults above."""
    for pool in (qwen_pool, llama_pool):
        rollout = pool.rollout()
        weights = pool.weights()
        version = pool.next_version()
        rollout.sync(iter(weights.items()), version)
        assert_sampled_from(pool, rollout, weights, version)


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes, st.integers(4, 200))
def test_buckets_hold_everything_once_in_order_within_the_limit(lengths, limit):
    weights = {f"w{i}": torch.arange(float(n)) for i, n in enumerate(lengths)}
    parts = list(buckets(iter(weights.items()), limit))
    assert [name for part in parts for name, _ in part] == list(weights)
    for part in parts:
        total = sum(tensor.nbytes for _, tensor in part)
        assert total <= limit or len(part) == 1
        for name, tensor in part:
            assert torch.equal(tensor, weights[name])
    for part, following in pairwise(parts):
        full = sum(tensor.nbytes for _, tensor in part) + following[0][1].nbytes
        assert full > limit


def test_a_weight_exported_twice_is_refused():
    twice = [("w", torch.ones(1)), ("w", torch.ones(1))]
    with pytest.raises(WeightError, match="w: exported twice"):
        list(sendable(iter(twice), torch.float32, "cpu"))
    with pytest.raises(WeightError, match="no weights were exported"):
        list(sendable(iter([]), torch.float32, "cpu"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_put_together_are_the_whole(size):
    """Every rank's rows and columns, recovered by hash from the tensors cut by hand."""
    heads, head_dim, hidden, vocab = 4, 2, 6, 70
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (heads * head_dim, hidden),
        "model.layers.0.self_attn.k_proj.weight": (2 * head_dim, hidden),
        "model.layers.0.self_attn.v_proj.weight": (2 * head_dim, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "model.embed_tokens.weight": (vocab, hidden),
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    expected = ExpectedChecksums([size], cuda=False, kv_heads=2)
    for name, tensor in weights.items():
        expected.add(name, tensor)
    q, k, v, o, embedding = weights.values()
    padded = torch.cat([embedding, torch.zeros(128 - vocab, hidden)])
    ranks = []
    for rank in range(size):
        # With 4 ranks the 2 key-value heads are held twice.
        first_kv, kv_rows = (rank * 2 // size * 2, 2) if size > 2 else (rank * 4 // size, 4 // size)
        q_rows = 8 // size
        fused = torch.cat(
            [
                q[rank * q_rows : (rank + 1) * q_rows],
                k[first_kv : first_kv + kv_rows],
                v[first_kv : first_kv + kv_rows],
            ]
        )
        held = {
            "model.layers.0.self_attn.qkv_proj.weight": fused,
            "model.layers.0.self_attn.o_proj.weight": o[:, rank * q_rows : (rank + 1) * q_rows],
            "model.embed_tokens.weight": padded[rank * 128 // size : (rank + 1) * 128 // size],
        }
        ranks.append(
            {
                "parallelism_info": {"tp_rank": rank},
                "checksums": {name: hash_cpu([tensor]) for name, tensor in held.items()},
            }
        )
    assert expected.compare("s", ranks) == 3 * size
    with pytest.raises(WeightError, match="reports weights of 3 ranks"):
        expected.compare("s", [ranks[0]] * 3)


# SGLang's own kernel, run on the CPU by Triton's interpreter: only its check that the tensor is on
# a GPU and its tuning are set aside.
KERNEL = """
import sys, torch
import sglang.kernels.ops.memory.gpu_tensor_hash as source

def words(t):
    flat = t.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([flat, flat.new_zeros(-flat.numel() % 4)]).view(torch.uint32)

source._as_uint32_words = words
class OnGpu(torch.Tensor):
    is_cuda = True

for tensor in torch.load(sys.argv[1]):
    print(f"{source.gpu_tensor_hash(tensor.as_subclass(OnGpu)):016x}")
"""


def test_the_cuda_hash_is_that_of_sglangs_kernel(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, generator=generator),
        torch.randn(7, 11, generator=generator).bfloat16(),
        torch.randn(5, generator=generator).half(),
        torch.randn(8192, generator=generator),
        torch.randn(3 * 8192 + 100, generator=generator),
        torch.zeros(9000),
    ]
    torch.save(tensors, tmp_path / "tensors.pt")
    run = subprocess.run(
        [sys.executable, "-c", KERNEL, str(tmp_path / "tensors.pt")],
        env={"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [hash_cuda([tensor]) for tensor in tensors]


@given(st.integers(1, 50), st.integers(0, 50))
def test_hashes_do_not_depend_on_how_rows_are_cut(rows, cut):
    tensor = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    for function in (hash_cpu, hash_cuda):
        assert function([tensor[:cut], tensor[cut:]]) == function([tensor])


@pytest.mark.parametrize("function", [hash_cpu, hash_cuda])
def test_hashes_see_every_bit(function):
    tensor = torch.zeros(20_000)
    seen = defaultdict(int)
    for place in (0, 1, 8191, 8192, 19_999):
        for value in (2.0**-149, -0.0, 1.0):
            changed = tensor.clone()
            changed[place] = value
            seen[function([changed])] += 1
    assert len(seen) == 15
    assert function([tensor]) not in seen


def test_addresses_are_ipv4():
    assert address_towards("http://localhost:30000") == "127.0.0.1"
    with pytest.raises(ServerError, match="no IPv4 address"):
        address_towards("http://no-such-host.invalid:30000")


def test_the_reference_notices_a_perturbation(qwen_pool):
    """Guards the tests above: the perturbed model really answers otherwise."""
    original = AutoModelForCausalLM.from_pretrained(qwen_pool.model.path, dtype=torch.float32)
    moved = qwen_pool.reference(perturbed(qwen_pool.weights(), 1))
    prompt, response = (5, 6, 7), (8, 9, 10, 11)
    gap = reference_logprobs(original, prompt, response) - reference_logprobs(
        moved, prompt, response
    )
    assert float(gap.abs().max()) > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -3e4, 3e4, "largest", "-largest"]), max_size=9),
    broken=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["nan", "inf", "-inf"])), max_size=2
    ),
)
def test_values_whose_sum_overflows_are_sent_and_what_is_not_finite_is_not(dtype, values, broken):
    largest = torch.finfo(dtype).max
    numbers = [{"largest": largest, "-largest": -largest}.get(v, v) for v in values]
    for place, what in broken:
        numbers.insert(place, float(what))
    weights = iter([("w", torch.tensor(numbers, dtype=dtype))])
    with pytest.raises(WeightError, match="w: holds values") if broken else nullcontext():
        assert [name for name, _ in sendable(weights, torch.float32, "cpu")] == ["w"]


def test_weights_that_somebody_else_changed_are_noticed(qwen_pool):
    rollout = qwen_pool.rollout()
    assert rollout.differing_weights() is None, "nothing was sent yet"
    weights = qwen_pool.weights()
    rollout.sync(iter(weights.items()), qwen_pool.next_version())
    assert rollout.differing_weights() == ""
    changed = weights | {NORM_1: weights[NORM_1] + 0.5}
    qwen_pool.rollout().sync(iter(changed.items()), qwen_pool.next_version())
    said = rollout.differing_weights()
    assert "1 of 34 weights are not what the trainer sent" in said
    assert NORM_1 in said
    rollout.sync(iter(weights.items()), qwen_pool.next_version())
