"""Each term of the planner's seconds against a small calculation by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opo.plan import assumptions, planner
from megatron_opo.plan.hardware import GPUS, NETWORKS, Cluster, Gpu, Network
from megatron_opo.plan.layout import held_by, layout_of, model_of
from megatron_opo.plan.search import apply
from megatron_opo.plan.sync import sync_time
from megatron_opo.plan.timing import Workload, generate_time, step_flops, update_time
from megatron_opo.recipe_file import load_recipe
from megatron_opo.weights.hf_config import read_architecture

RECIPES = Path(__file__).parents[1] / "recipes"
H100, NDR = GPUS["h100"], NETWORKS["ib-ndr"]
LINKS = 0.7  # of their peak


def model_of_config(name: str):
    return model_of(read_architecture(json.loads((RECIPES / "models" / name).read_text())))


LLAMA = model_of_config("DeepSeek-R1-Distill-Llama-70B.json")
LLAMA_MATRICES = 70_553_706_496 - 128_256 * 8192 - 161 * 8192
QWEN_MOE = model_of_config("Qwen3-30B-A3B.json")
# 10,000 samples of 1,000 tokens, whose lengths differ by next to nothing.
WORK = Workload(1000, 10_000, 100, 900, 901)
TOKENS = 10_000_000
DENSE = load_recipe(RECIPES / "opo_70b.yaml")
SPARSE = load_recipe(RECIPES / "opo_moe_30b_a3b.yaml")
ONE = {
    "actor.tensor_parallel": 1,
    "actor.sequence_parallel": False,
    "actor.pipeline_parallel": 1,
    "actor.recompute": "none",
    "actor.micro_batch_tokens": 20_000,
}


def update(model, recipe, nodes: int, **actor):
    recipe = apply(recipe, ONE | {f"actor.{name}": value for name, value in actor.items()})
    cluster = Cluster(H100, NDR, nodes, 8)
    layout = layout_of(recipe, cluster.trainer_gpus)
    return update_time(model, recipe, cluster, layout, WORK, step_flops(model, WORK)), layout


def test_the_235b_config_has_the_published_number_of_parameters():
    """235B in all and 22B for a token: from its sizes, by hand."""
    model = model_of_config("Qwen3-235B-A22B.json")
    attention = 4096 * 128 * (64 + 2 * 4) + 64 * 128 * 4096 + 2 * 128
    expert = 3 * 4096 * 1536
    others = attention + 4096 * 128 + 2 * 4096
    ends = 2 * 151_936 * 4096 + 4096
    assert model.parameters == 94 * (others + 128 * expert) + ends == 235_093_634_560
    assert 94 * (others + 8 * expert) + ends == pytest.approx(22e9, rel=0.01)
    assert model.tensors == 94 * (4 + 2 + 1 + 2 + 128 * 3) + 3
    assert model.largest_tensor == 151_936 * 4096


def test_a_ring_has_a_link_for_each_of_its_ranks_in_a_node():
    cluster = Cluster(Gpu("", 1, 1, 1, 450e9), Network("", 50e9), 4, 8)
    assert cluster.ring(8) == cluster.ring(4, 2) == cluster.ring(1, 8) == 450e9
    assert cluster.ring(16) == 400e9
    assert cluster.ring(4, 8) == 50e9  # one rank in each node
    assert cluster.ring(16, 2) == 200e9
    assert cluster.ring(2, 16) == 50e9
    assert replace(cluster, network=Network("", 100e9)).ring(16) == 450e9


def test_an_update_without_messages_is_its_arithmetic_alone():
    alone, _ = update(LLAMA, DENSE, 1, data_parallel=8)
    linear = 6 * (LLAMA_MATRICES - 128_256 * 8192) * TOKENS
    head = 8 * 128_256 * 8192 * 9_000_000  # of responses; logits are made twice
    attention = 3.5 * 4 * 80 * 8192 * 10_000 * 1000 * 1001 / 2
    expected = (linear + head + attention) / (8 * 989.4e12 * 0.55)
    assert alone.compute_seconds == pytest.approx(expected, rel=1e-4)
    others = ("tensor", "context", "expert", "stage", "start", "hidden")
    assert all(getattr(alone, f"{name}_seconds") == 0 for name in others)
    assert alone.seconds == pytest.approx(alone.compute_seconds + alone.data_seconds)


def test_stages_wait_for_each_other_and_send_the_residual_stream():
    piped, layout = update(LLAMA, DENSE, 4, pipeline_parallel=8, virtual_pipeline=2)
    assert layout.data == 4
    assert piped.micro_batches == 136  # 2.5 M tokens by 19,000, rounded up to groups of 8
    # Twice over the two chunks, there and back: 8,192 bfloat16 a token.
    sent = 2 * 2 * 2_500_000 * 8192 * 2
    assert piped.stage_seconds == pytest.approx(sent / (50e9 * LINKS))
    assert piped.start_seconds == pytest.approx(136 * 4 * 30e-6)
    computing = piped.compute_seconds + piped.stage_seconds + piped.start_seconds
    assert piped.bubble * piped.seconds == pytest.approx(computing * 7 / (136 * 2))


def test_many_small_micro_batches_start_many_messages():
    small, layout = update(
        LLAMA, DENSE, 4, context_parallel=2, tensor_parallel=8, sequence_parallel=True
    )
    assert layout.copies == 4
    # A layer: 10 for the tensor-parallel stream, 2 for keys and values.
    assert small.start_seconds == pytest.approx(small.micro_batches * 80 * 12 * 30e-6)


def test_gradients_are_reduced_while_the_last_micro_batch_goes_back():
    late, layout = update(LLAMA, DENSE, 2)
    buffer = held_by(LLAMA, layout, 0).buffer
    ring = buffer * 15 / 16 / (400e9 * LINKS)  # eight links of 50 GB/s
    assert late.hidden_seconds == 0
    assert late.data_seconds == pytest.approx(ring * (4 + 2))

    early, _ = update(LLAMA, DENSE, 2, grad_bucket_mb=1024)
    backward = early.compute_seconds / early.micro_batches * 2 / 3
    reduce = ring * 4
    last = reduce * 2**30 / (4 * buffer)
    assert 0 < reduce - last < backward
    assert early.hidden_seconds == pytest.approx(reduce - last)
    assert late.seconds - early.seconds == pytest.approx(reduce - last)

    whole, _ = update(LLAMA, DENSE, 2, grad_bucket_mb=1e9)
    assert whole.hidden_seconds == 0  # one bucket: full only at the end


def test_the_window_to_hide_in_is_the_backward_pass_of_one_micro_batch():
    """A slow network: then the whole window is used, and no more."""
    recipe = apply(DENSE, ONE | {"actor.grad_bucket_mb": 64})
    cluster = Cluster(H100, Network("slow", 1e8), 2, 8)
    layout, flops = layout_of(recipe, 16), step_flops(LLAMA, WORK)
    slow = update_time(LLAMA, recipe, cluster, layout, WORK, flops)
    share = 1 - flops.forward / flops.computed(False)
    window = slow.compute_seconds / slow.micro_batches * share
    assert slow.hidden_seconds == pytest.approx(window)


def test_experts_are_sent_tokens_and_waited_for():
    """30B-A3B, 32 GPUs, experts over 16 of them: 8 of them here, 8 on the other node."""
    spread, layout = update(
        QWEN_MOE, SPARSE, 4, expert_parallel=16, expert_tensor_parallel=1, data_parallel=32
    )
    imbalance = assumptions.EXPERT_IMBALANCE.value
    rows = TOKENS / 32 * 8 * imbalance
    sent = rows * 2048 * 2 * 4 * 48  # there and back, forward and backward
    assert spread.expert_seconds == pytest.approx(sent * 8 / 16 / (50e9 * LINKS))
    inside, _ = update(QWEN_MOE, SPARSE, 4, expert_parallel=8, expert_tensor_parallel=1)
    assert inside.expert_seconds == pytest.approx(sent * 7 / 8 / (450e9 * LINKS))
    # The busiest rank's experts have half as much again to compute.
    whole, _ = update(QWEN_MOE, SPARSE, 4, expert_parallel=1, expert_tensor_parallel=1)
    own = 6 * 48 * 8 * 3 * 2048 * 768 * TOKENS * (imbalance - 1)
    waited = spread.compute_seconds - whole.compute_seconds
    assert waited == pytest.approx(own / (32 * 989.4e12 * 0.55))

    # Two ranks have the same experts, 32 the rest.
    held = held_by(QWEN_MOE, layout, 0)
    expert = 48 * 8 * 3 * 2048 * 768
    assert held.experts == pytest.approx(expert, rel=1e-4)
    moved = (held.buffer - held.experts) * 31 / 32 / 400e9 + held.experts / 2 / 50e9
    assert spread.data_seconds == pytest.approx(moved * 6 / LINKS)


def test_no_server_makes_the_longest_response_shorter():
    path = RECIPES / "opo_7b.yaml"
    recipe = load_recipe(path, ["rollout.server_args.mem_fraction_static=0.5"])
    config_path, config = planner.find_config(recipe, path, None)
    seconds = []
    for nodes in (1, 4, 32, 64):
        changed = apply(recipe, {"rollout.servers": 4 * nodes})
        made = planner.make_plan(changed, config, config_path, Cluster(H100, NDR, nodes, 8))
        assert made.generate.longest_seconds <= made.generate.seconds
        seconds.append((made.generate.seconds, made.generate.longest_seconds))
    assert sorted(seconds, reverse=True) == seconds
    one = replace(made.work, prompts=1, samples=1, mean_response=8192)
    alone = generate_time(made.model, changed, made.cluster, made.memory.server, one)
    # At the mean context instead of its own: a little less of the cache is read.
    assert seconds[-1][1] == pytest.approx(alone.seconds, rel=0.01)


def test_a_sync_is_what_is_slower_of_gathering_and_sending():
    size, tensors = 141_107_412_992, 80 * 9 + 3
    network, node = 50e9 * LINKS, 450e9 * LINKS

    def sync(nodes: int, apart: int = 0, **fields):
        changes = {"rollout.nodes": apart, "rollout.servers": apart or nodes}
        recipe = apply(DENSE, changes | {"sync.bucket_mb": 1024} | fields)
        cluster = Cluster(H100, NDR, nodes, 8, apart)
        return sync_time(LLAMA, recipe, cluster, layout_of(recipe, cluster.trainer_gpus))

    beside = sync(16)
    messages = -(-size // 2**30)
    assert beside.transfer_seconds == pytest.approx(size / network + size / node)
    assert beside.load_seconds == pytest.approx(tensors * 100e-6)
    assert (beside.messages, beside.call_seconds) == (
        messages,
        pytest.approx(messages * (5e-3 + 16 * 0.3e-3)),
    )
    # One stage of four is on rank 0's node.
    gather = size * 3 / 4 / network + size / 4 / node + tensors * 100e-6
    assert beside.gather_seconds == pytest.approx(gather)
    sending = beside.transfer_seconds + beside.load_seconds + beside.call_seconds
    assert beside.seconds == pytest.approx(max(gather, sending)) == sending

    apart = sync(16, apart=4)
    assert apart.transfer_seconds == pytest.approx(size / network)  # a broadcast to all their ranks
    assert apart.seconds < beside.seconds

    alone = sync(1, **{"actor.pipeline_parallel": 1})
    assert alone.transfer_seconds == pytest.approx(size / node)
    assert alone.gather_seconds == pytest.approx(size / node + tensors * 100e-6)


def test_experts_on_other_nodes_are_gathered_over_the_network():
    size = 61_064_245_248
    recipe = apply(SPARSE, {"actor.expert_parallel": 16, "rollout.servers": 8})
    cluster = Cluster(H100, NDR, 4, 8)
    sync = sync_time(QWEN_MOE, recipe, cluster, layout_of(recipe, 32))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    outside = experts / 2
    seconds = outside / (50e9 * LINKS) + (size - outside) / (450e9 * LINKS)
    assert sync.gather_seconds == pytest.approx(seconds + 18_867 * 100e-6)
