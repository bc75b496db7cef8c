"""The planner's formulas against what real ranks hold, and the advice that it gives."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import models
import pytest
import torch
from actor_cases import RECIPE
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Allocations, measure
from ranks import run_ranks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megatron_opo.actor.logprobs import token_logprobs
from megatron_opo.cluster import lay_out
from megatron_opo.errors import RecipeError
from megatron_opo.plan import activations, planner
from megatron_opo.plan.flops import forward_flops
from megatron_opo.plan.hardware import (
    GIB,
    GPUS,
    NETWORKS,
    Cluster,
    find_gpu,
    find_network,
    peak_flops,
)
from megatron_opo.plan.layout import Layout, chunks_of, held_by, layout_of, model_of
from megatron_opo.plan.memory import (
    kv_per_token,
    leads_a_node,
    pass_of,
    server_weights,
    trainer_memory,
)
from megatron_opo.plan.search import apply, suggest
from megatron_opo.plan.timing import Workload, generate_time
from megatron_opo.recipe_file import load_recipe
from megatron_opo.weights.hf_config import read_architecture

RECIPES = Path(__file__).parents[1] / "recipes"
# Sizes of the published checkpoints in bfloat16 (metadata.total_size of their index files).
PUBLISHED_BYTES = {
    "DeepSeek-R1-Distill-Llama-70B": 141_107_412_992,
    "Llama-3.3-70B-Instruct": 141_107_412_992,
    "DeepSeek-R1-Distill-Qwen-32B": 65_527_752_704,
    "Qwen2.5-32B-Instruct": 65_527_752_704,
    "DeepSeek-R1-Distill-Qwen-7B": 15_231_233_024,
    "Qwen3-30B-A3B": 61_064_245_248,
}
CLUSTER_RECIPES = ("opo_7b", "opo_32b", "opo_70b", "opo_moe_30b_a3b")


def config_of(name: str) -> dict:
    return json.loads((RECIPES / "models" / f"{name}.json").read_text())


def plan(name: str, overrides=(), gpu: str = "h100", **cluster):
    path = RECIPES / f"{name}.yaml"
    recipe = load_recipe(path, overrides)
    config_path, config = planner.find_config(recipe, path, None)
    where = planner.cluster_of(recipe, find_gpu(gpu), find_network("ib-ndr"), **cluster)
    return planner.make_plan(recipe, config, config_path, where), config, config_path


PLANS = {name: plan(name) for name in CLUSTER_RECIPES}


# What ranks hold


@pytest.mark.parametrize("name", PUBLISHED_BYTES)
def test_parameter_counts_are_those_of_the_published_checkpoints(name):
    architecture = read_architecture(config_of(name))
    model = model_of(architecture)
    assert architecture.parameter_count() * 2 == PUBLISHED_BYTES[name]
    assert model.parameters * 2 == PUBLISHED_BYTES[name]


TENSOR = ["actor.tensor_parallel=2", "actor.sequence_parallel=true"]
STAGES = ["actor.pipeline_parallel=2", "actor.micro_batch_tokens=50"]
BF16 = ["model.dtype=bfloat16"]
RANKS = {
    "bf16, plain optimizer": (
        "tiny_qwen2",
        {"tie": False},
        1,
        [*BF16, "optimizer.distributed=false"],
    ),
    "recompute": ("tiny_qwen3", {"tie": True}, 1, ["actor.recompute=full"]),
    "tensor, odd vocabulary": ("tiny_llama", {"tie": False}, 2, TENSOR),
    "stages, tied": ("tiny_qwen3", {"tie": True}, 2, STAGES),
    "stages of two chunks": (
        "tiny_llama",
        {"tie": False},
        2,
        [*STAGES, "actor.virtual_pipeline=2"],
    ),
    "context": ("tiny_llama", {"tie": False}, 2, ["actor.context_parallel=2"]),
    "experts": ("tiny_qwen3_moe", {}, 2, ["actor.expert_parallel=2"]),
    "experts and tensor": (
        "tiny_qwen3_moe",
        {},
        2,
        [*BF16, *TENSOR, "actor.expert_parallel=2", "actor.expert_tensor_parallel=1"],
    ),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_hold_and_save_what_the_plan_says(case, tmp_path):
    family, options, world, overrides = RANKS[case]
    overrides = [*overrides, "sync.transport=shared_memory", "sync.bucket_mb=1"]
    lengths = [48, 48, 48]
    path = str(getattr(models, family)(tmp_path / "model", **options))
    ranks = run_ranks(world, measure, path, str(tmp_path), lengths, overrides)

    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text(RECIPE.format(model=path, run_dir=tmp_path))
    recipe = load_recipe(recipe_path, overrides)
    config = json.loads((Path(path) / "config.json").read_text())
    model, layout = model_of(read_architecture(config)), layout_of(recipe, world)
    # Transformer Engine saves fewer tensors than what runs on a CPU; here, the latter's.
    tokens = sum(lengths) // layout.context
    step = replace(pass_of(recipe), tokens=tokens, scored=tokens - 1, engine=False)
    batches = int(ranks[0].get("micro_batches", 1))
    stages = trainer_memory(model, recipe, layout, batches, gpus_per_node=world)
    for stage in stages:
        assert stage.bucket == max(r["bucket"] for r in ranks if r["stage"] == stage.stage)
    assert sum(rank["bucket"] for rank in ranks) == 2 * 2**20
    for rank in ranks:
        stage = stages[rank["stage"]]
        assert rank["parameters"] == stage.parameters
        assert rank["weights"] == stage.weights
        assert rank["gradients"] == stage.gradients
        assert rank["optimizer"] == pytest.approx(stage.optimizer, rel=1e-3)
        assert rank["optimizer"] <= stage.optimizer
        if layout.pipeline > 1:
            expected = activations.in_flight(layout, stage.stage, batches)
            assert (rank["micro_batches"], rank["in_flight"]) == (batches, expected)
    if layout.pipeline == 1:
        check_pass(ranks, model, recipe, layout, step, lengths)
    check_operations(ranks, model, recipe, layout)


def check_operations(ranks, model, recipe, layout):
    """Of an update on a ragged batch, said in its metrics and computed by all ranks."""
    flops = forward_flops(model, *ranks[0]["batch"])
    assert flops.attention > 0
    assert ranks[0]["said_flops"] == pytest.approx(flops.model, rel=1e-9)
    if layout.tensor == layout.virtual == layout.context == 1:  # else there are dummy tokens, too
        # torch does not count its fused attention on a CPU.
        computed = replace(flops, attention=0).computed(recipe.actor.recompute == "full")
        assert sum(rank["update_flops"] for rank in ranks) == computed


def check_pass(ranks, model, recipe, layout, step, lengths):
    chunk = chunks_of(model.architecture.layers, layout, 0)[0]
    # Ranks with experts save more or less as the router decides, but all of them together the sum.
    even = replace(layout, expert=1)
    saved = activations.chunk_saved(model, even, chunk, step)
    mean = sum(rank["saved"] for rank in ranks) / len(ranks)
    # On a CPU a chunk and the keys of other ranks have a mask, too.
    chunks = 2 * layout.context if layout.context > 1 else 0
    masks = 4 * sum((chunks + 1) * (n // chunks) ** 2 for n in lengths) if chunks else 0
    masks *= model.architecture.layers
    assert mean - masks == pytest.approx(saved, rel=1e-4)
    logits = activations.logits_workspace(model, layout, 16, step)
    workspace = max(logits, activations.layer_workspace(model, layout, step))
    planned = activations.chunk_saved(model, layout, chunk, step) + workspace
    worst = max(rank["peak"] for rank in ranks)
    assert worst <= planned <= 1.25 * worst
    # torch does not count its fused attention on a CPU.
    flops = replace(forward_flops(model, lengths, step.scored * layout.context), attention=0)
    counted = sum(rank["flops"] for rank in ranks)
    passes = len(ranks) // (layout.tensor * layout.context)
    assert counted == flops.computed(step.recompute) * passes


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.integers(1, 3),
    chunk=st.sampled_from([16, 64]),
    last=st.integers(1, 64),
    hidden=st.sampled_from([16, 96]),
    vocabulary=st.integers(300, 1000),
    temperature=st.sampled_from([1.0, 0.7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_peak_of_the_logits_is_what_torch_allocates(
    chunks, chunk, last, hidden, vocabulary, temperature, dtype
):
    tokens = (chunks - 1) * chunk + min(last, chunk)
    states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Allocations([states, weight, targets]) as allocations:
        scores = token_logprobs(
            states,
            weight,
            targets,
            temperature=temperature,
            vocab_size=vocabulary,
            chunk_tokens=chunk,
        )
        scores.logprobs.sum().backward()
    planned = activations.chunked_logits_peak(
        tokens,
        hidden,
        vocabulary,
        chunk_tokens=chunk,
        width=dtype.itemsize,
    )
    slack = 0.03 * planned + 60 * tokens  # a few numbers per token
    assert allocations.peak <= planned + slack
    if last >= chunk:
        assert allocations.peak >= planned - slack


@settings(deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 6),
    data=st.integers(1, 6),
    per_node=st.integers(1, 9),
)
def test_a_bucket_is_on_the_lowest_rank_of_each_node(tensor, pipeline, data, per_node):
    layout = Layout(tensor, pipeline, 1, 1, 1, data, False, True)
    leaders = range(0, tensor * pipeline * data, per_node)
    stages = {rank // (tensor * data) for rank in leaders}
    found = {stage for stage in range(pipeline) if leads_a_node(layout, stage, per_node)}
    assert found == stages


def test_a_bucket_holds_the_largest_tensor_and_stays_in_both_phases():
    small, _, _ = PLANS["opo_70b"]
    table = 128_256 * 8192 * 2 + 512 * 2**20
    assert {stage.bucket for stage in small.memory.trainers} == {table}
    large, _, _ = plan("opo_70b", ["sync.bucket_mb=4096"])
    more = 2 * 2**32 - table
    for here, there in zip(small.memory.trainers, large.memory.trainers, strict=True):
        assert there.total - here.total == more
    assert large.memory.server.trainer - small.memory.server.trainer == more
    without, _, _ = plan("opo_70b", ["sync.transport=distributed"])
    assert {stage.bucket for stage in without.memory.trainers} == {0}
    assert small.memory.server.trainer - without.memory.server.trainer == table


def test_what_is_not_handed_over_is_there_in_both_phases():
    """Every GPU has the whole trainer and the whole server all the time."""
    fraction = "rollout.server_args.mem_fraction_static=0.3"
    both, _, _ = plan("opo_7b", ["rollout.hand_over_memory=false", fraction], "h200")
    turns, _, _ = plan("opo_7b", [fraction], "h200")
    assert both.fits and turns.fits
    server, trainer = both.memory.server, max(both.memory.trainers, key=lambda each: each.total)
    assert server.weights + server.kv_cache == pytest.approx(0.3 * 139.8 * GIB)
    assert trainer.server == server.weights + server.kv_cache + server.workspace
    assert server.trainer == pytest.approx(trainer.total - trainer.server)
    # The context of a server that has released the rest is part of what it keeps.
    alone = max(stage.total for stage in turns.memory.trainers) - 3 * GIB
    assert server.trainer == pytest.approx(alone)
    assert (both.host_memory, both.handover_seconds) == (0, 0)
    assert turns.host_memory > 0 and turns.handover_seconds > 0


# Operations


def test_flops_are_those_that_torch_counts_in_transformers(tmp_path):
    path = models.tiny_qwen3(tmp_path / "model", tie=False)
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model = model_of(read_architecture(network.config.to_dict()))
    tokens = torch.randint(0, 90, (3, 40))
    with FlopCounterMode(display=False) as counter:
        loss = network(tokens).logits.sum()
    # Eager attention computes the full square and masks half of it out.
    expected = forward_flops(model, [40] * 3, scored=120, causal=False)
    assert counter.get_total_flops() == expected.forward
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * expected.forward


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=4), window=st.none() | st.integers(1, 40))
def test_attention_counts_the_pairs_that_see_each_other(lengths, window):
    config = {**config_of("Qwen3-30B-A3B"), "model_type": "qwen3"}
    config = {k: v for k, v in config.items() if "expert" not in k and "moe" not in k}
    for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        del config[key]
    architecture = read_architecture(config)
    model = model_of(replace(architecture, windows=(window,) * architecture.layers))
    pairs = sum(
        1
        for n in lengths
        for query in range(n)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    expected = 48 * 4 * pairs * 32 * 128  # layers, two products of two operations, heads, head_dim
    assert forward_flops(model, lengths, scored=0).attention == expected


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        # Slower variants of the name, a part of a device, and other devices.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
    ],
)
def test_the_peak_is_that_of_the_very_device_or_unknown(device, peak):
    assert peak_flops(device) == peak


def test_a_70b_step_costs_six_flops_per_weight_and_token_and_attention_on_top():
    model = model_of(read_architecture(config_of("DeepSeek-R1-Distill-Llama-70B")))
    short = forward_flops(model, [1] * 1000, scored=1000)
    matrices = 70_553_706_496 - 128_256 * 8192 - 161 * 8192  # no embedding table, no norms
    assert short.layers + short.head == 2 * 1000 * matrices
    assert short.model == 3 * short.forward


# Servers


def test_the_cache_of_a_token_takes_what_its_keys_and_values_do():
    llama = model_of(read_architecture(config_of("DeepSeek-R1-Distill-Llama-70B")))
    assert kv_per_token(llama, 1, "auto", "bfloat16") == 327_680
    assert kv_per_token(llama, 8, "auto", "bfloat16") == 327_680 / 8
    assert kv_per_token(llama, 16, "auto", "bfloat16") == 327_680 / 8  # no rank without a head
    assert kv_per_token(llama, 8, "fp8_e5m2", "bfloat16") == 327_680 / 16
    eighth = server_weights(llama, 8, 2)
    replicated = 161 * 8192 * 2
    assert (
        eighth == (PUBLISHED_BYTES["DeepSeek-R1-Distill-Llama-70B"] - replicated) / 8 + replicated
    )


@settings(max_examples=30, deadline=None)
@given(
    samples=st.integers(1, 60),
    mean=st.integers(1, 300),
    longest=st.integers(300, 900),
    limit=st.integers(1, 64),
    tokens=st.integers(0, 20_000),
)
def test_every_sampled_token_is_decoded_once(samples, mean, longest, limit, tokens):
    full, _, _ = PLANS["opo_7b"]
    recipe = apply(full.recipe, {"rollout.max_concurrent_requests": limit, "rollout.servers": 1})
    work = Workload(1, samples, 10, mean, longest)
    per_token = full.memory.server.kv_per_token
    server = replace(full.memory.server, kv_cache=tokens * per_token)
    result = generate_time(full.model, recipe, full.cluster, server, work)
    assert result.concurrency * result.steps == pytest.approx(sum(work.responses(samples)))
    assert result.most <= limit
    assert 0 < result.bandwidth <= 1 and 0 < result.compute <= 1
    if result.most > 1:
        assert result.most * 11 <= server.kv_tokens


def test_one_sample_alone_decodes_at_the_speed_of_memory():
    full, _, _ = plan("opo_7b", ["rollout.servers=1"])
    work = Workload(1, 1, 1, 1000, 8192)
    result = generate_time(full.model, full.recipe, full.cluster, full.memory.server, work)
    # Two GPUs read half of the weights each, but the embedding's table, and a cache of 501 tokens.
    read = (15_231_233_024 - 152_064 * 3584 * 2) / 2 + 501 * 28 * 4 * 128 * 2
    step = read / (3350e9 * 0.7) + 1e-3 + 2 * 28 * 15e-6
    assert result.seconds == pytest.approx(1000 * step, rel=1e-3)


@settings(deadline=None)
@given(
    mean=st.integers(1, 500),
    longest=st.integers(500, 900),
    count=st.integers(1, 200),
)
def test_lengths_of_responses_have_the_mean_and_keep_the_limit(mean, longest, count):
    lengths = Workload(1, count, 1, mean, longest).responses(count)
    assert len(lengths) == count
    assert min(lengths) >= 1 and max(lengths) <= longest
    assert sum(lengths) / count == pytest.approx(mean, abs=0.5)


# Recipes and advice


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_recipes_for_clusters_fit_on_80_and_on_141_gb(name, gpu):
    made, _, _ = plan(name, gpu=gpu)
    assert made.fits, made.memory.problems
    nodes = {"opo_7b": 1, "opo_32b": 4, "opo_70b": 16, "opo_moe_30b_a3b": 2}
    assert (made.cluster.nodes, made.cluster.gpus_per_node) == (nodes[name], 8)
    assert lay_out(made.recipe, nodes[name], 8).world_size == 8 * nodes[name]


@pytest.mark.parametrize(
    ("name", "overrides", "nodes"),
    [
        ("opo_7b", ["actor.recompute=none"], 1),
        (
            "opo_32b",
            ["actor.tensor_parallel=8", "actor.pipeline_parallel=1", "actor.recompute=none"],
            4,
        ),
        ("opo_70b", ["actor.recompute=none"], 16),
        ("opo_moe_30b_a3b", ["rollout.servers=2"], 1),
    ],
)
def test_what_recipes_say_of_141_gb_is_so(name, overrides, nodes):
    text = (RECIPES / f"{name}.yaml").read_text().replace("\n# ", " ")
    assert all(override in text for override in overrides)
    assert plan(name, overrides, "h200", nodes=nodes)[0].fits


@pytest.mark.parametrize(
    ("name", "overrides", "gpu", "cluster"),
    [
        ("opo_7b", ["actor.recompute=none"], "h100", {}),
        ("opo_7b", ["rollout.server_args.mem_fraction_static=0.95"], "h200", {}),
        ("opo_7b", ["rollout.server_args={}"], "b200", {}),
        ("opo_7b", ["actor.tensor_parallel=1", "actor.sequence_parallel=false"], "l40s", {}),
        ("opo_7b", ["rollout.hand_over_memory=false"], "h100", {}),
        ("opo_7b", ["rollout.servers=16"], "h100", {"nodes": 1}),
        ("opo_70b", ["actor.recompute=none"], "a100-80", {}),
        ("opo_70b", ["actor.pipeline_parallel=1"], "h100", {"nodes": 2}),
        ("opo_70b", ["rollout.tensor_parallel=1", "rollout.nodes=4"], "h200", {"nodes": 16}),
        (
            "opo_70b",
            ["rollout.nodes=1", "rollout.servers=1", "actor.pipeline_parallel=1"],
            "h100",
            {"nodes": 2},
        ),
        ("opo_moe_30b_a3b", ["actor.expert_parallel=1"], "h100", {"nodes": 2}),
    ],
)
def test_advice_for_a_recipe_that_does_not_fit_makes_it_fit(name, overrides, gpu, cluster):
    made, config, config_path = plan(name, overrides, gpu, **cluster)
    assert made.memory.problems
    advice = suggest(made, config, config_path)
    assert advice
    assert all(first.cost <= second.cost for first, second in pairwise(advice))
    for each in advice:
        changed = planner.make_plan(
            apply(made.recipe, each.overrides),
            config,
            config_path,
            planner.cluster_of(
                apply(made.recipe, each.overrides),
                made.cluster.gpu,
                made.cluster.network,
                nodes=each.nodes,
            ),
        )
        assert changed.fits, changed.memory.problems
        # As a user would give it on the command line, and for the launchers of a job.
        again, _, _ = plan(name, [*overrides, *each.words()], gpu, nodes=each.nodes)
        assert again.fits
        assert lay_out(again.recipe, each.nodes, 8).world_size == again.cluster.trainer_gpus


def test_more_ranks_share_a_sequence_that_is_too_long_for_one():
    long = ["rollout.max_response_tokens=130000", "actor.micro_batch_tokens=131024"]
    made, config, config_path = plan("opo_7b", long)
    advice = [each.words() for each in suggest(made, config, config_path)]
    assert ["actor.context_parallel=2", "actor.micro_batch_tokens=65512"] in advice


def test_the_smallest_advice_changes_one_thing():
    made, config, config_path = plan("opo_70b", ["actor.recompute=none"])
    assert suggest(made, config, config_path)[0].words() == ["actor.recompute=full"]
    assert {problem.phase for problem in made.memory.problems} == {"update"}
    assert "pipeline stage 1 of 4" in made.memory.problems[0].where


def test_where_nothing_helps_there_is_no_advice():
    made, config, config_path = plan("opo_7b", gpu="h100", nodes=1)
    tiny = replace(made.cluster, gpu=replace(made.cluster.gpu, memory=4 * GIB))
    made = planner.make_plan(made.recipe, config, config_path, tiny)
    assert suggest(made, config, config_path) == []


# Properties


def held_everywhere(config: dict, **sizes) -> list[int]:
    model = model_of(read_architecture(config))
    fields = {"tensor": 1, "pipeline": 1, "virtual": 1, "expert": 1, "expert_tensor": 1, "data": 1}
    layout = Layout(**(fields | sizes), sequence_parallel=False, distributed_optimizer=True)
    return [held_by(model, layout, stage).parameters for stage in range(layout.pipeline)]


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(PUBLISHED_BYTES)),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
)
def test_ranks_of_a_replica_hold_the_model_and_more_ranks_hold_less_each(name, tensor, pipeline):
    config = config_of(name)
    total = PUBLISHED_BYTES[name] // 2
    here = held_everywhere(config, tensor=tensor, expert_tensor=tensor, pipeline=pipeline)
    # Norms and routers are held by every tensor-parallel rank.
    whole = sum(
        math.prod(shape)
        for parameter, shape in read_architecture(config).hf_shapes().items()
        if "norm" in parameter or "mlp.gate." in parameter
    )
    assert sum(here) * tensor == total + (tensor - 1) * whole
    wider = held_everywhere(config, tensor=2 * tensor, expert_tensor=2 * tensor, pipeline=pipeline)
    assert max(wider) < max(here)
    longer = held_everywhere(config, tensor=tensor, expert_tensor=tensor, pipeline=2 * pipeline)
    assert max(longer) < max(here)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(CLUSTER_RECIPES),
    data=st.data(),
    nodes=st.sampled_from([4, 8, 16]),
)
def test_memory_grows_and_shrinks_as_it_should(name, data, nodes):
    tokens = data.draw(st.integers(17_408, 60_000))
    recompute = data.draw(st.sampled_from(["none", "full"]))
    base = {"micro_batch_tokens": tokens, "recompute": recompute}

    made, config, config_path = PLANS[name]

    def stages(nodes=nodes, **changes):
        servers = nodes * 8 // made.recipe.rollout.tensor_parallel
        actor = {f"actor.{field}": value for field, value in (base | changes).items()}
        recipe = apply(made.recipe, {"rollout.servers": servers, **actor})
        cluster = replace(made.cluster, nodes=nodes)
        memory = planner.plan_memory(recipe, config, config_path, made.model, cluster, made.work)
        return memory.trainers

    here = stages()
    for more in (stages(micro_batch_tokens=60_000), stages(recompute="none")):
        assert all(b.total >= a.total for a, b in zip(here, more, strict=True))
    replicas = stages(nodes=2 * nodes)
    assert all(b.optimizer < a.optimizer for a, b in zip(here, replicas, strict=True))
    assert all(b.weights <= 1.001 * a.weights for a, b in zip(here, replicas, strict=True))
    half = {"context_parallel": 2, "micro_batch_tokens": -(-tokens // 2)}
    for one, shared in zip(replicas, stages(nodes=2 * nodes, **half), strict=True):
        for held in ("weights", "gradients", "optimizer"):
            assert getattr(shared, held) == getattr(one, held)
        assert shared.activations <= 0.51 * one.activations
        assert shared.workspace < one.workspace
    narrow = stages(logprob_chunk_tokens=256)
    assert all(b.total <= a.total for a, b in zip(here, narrow, strict=True))


@settings(deadline=None)
@given(
    pipeline=st.sampled_from([2, 4, 8]),
    virtual=st.integers(1, 4),
    groups=st.integers(1, 6),
)
def test_earlier_stages_have_more_passes_in_flight(pipeline, virtual, groups):
    layout = Layout(1, pipeline, virtual, 1, 1, 1, False, True)
    batches = groups * pipeline
    waiting = [activations.in_flight(layout, stage, batches) for stage in range(pipeline)]
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[-1] >= 1 and waiting[0] <= batches * virtual


def test_chunks_of_stages_are_all_layers_in_turn():
    layout = Layout(1, 2, 3, 1, 1, 1, False, True)
    found = [(c.first, c.end, stage) for stage in (0, 1) for c in chunks_of(12, layout, stage)]
    assert sorted(found) == [(2 * i, 2 * i + 2, i % 2) for i in range(6)]


# The command


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_opo", "plan", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=RECIPES.parent,
    )


def test_the_command_shows_one_screen_and_exits_by_what_it_found():
    fits = command("recipes/opo_70b.yaml")
    assert fits.returncode == 0, fits.stderr
    lines = fits.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100
    assert "\x1b" not in fits.stdout and fits.stdout.isascii()
    for words in ("16 x 8 h100", "70,553,706,496 parameters", "stage 1 of 4", "It fits", "Assumed"):
        assert words in fits.stdout

    fails = command("recipes/opo_70b.yaml", "--json", "actor.recompute=none", "--gpu", "a100-80")
    assert fails.returncode == 1, fails.stderr
    told = json.loads(fails.stdout)
    assert told["fits"] is False
    assert told["suggestions"][0] == {
        "nodes": 16,
        "overrides": ["actor.recompute=full"],
    }
    stage = told["memory"]["update"][0]
    parts = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
    parts += ("bucket", "server")
    assert stage["total"] == pytest.approx(sum(stage[part] for part in parts))
    assert told["problems"][0]["over"] == pytest.approx(stage["total"] - 79.1 * GIB)
    phases = ("generate", "update", "sync", "handover")
    assert told["step"]["seconds"] == pytest.approx(sum(told[p]["seconds"] for p in phases))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h300"], "--gpu: 'h300' is not known; allowed: a100-80, h100"),
        (["--network", "fast"], "--network: 'fast' is not known; allowed: ib-ndr"),
        (["--gpu-memory-gb", "-1"], "--gpu-memory-gb: -1 is not a size"),
        (["--gpus", "0"], "--gpus: 0; it must be 1 or more"),
        (["--gpus", "12"], "--gpus: 12 are not whole nodes of 8"),
        (["--gpus", "8", "--nodes", "1"], "--gpus and --nodes: give one of them"),
        (["--nodes", "2", "rollout.nodes=2"], "rollout.nodes: 2 for servers alone leaves none"),
        (["rollout.urls=[http://host:1]"], "rollout.urls names servers that run somewhere else"),
        (["--gpus", "7"], "7 trainer GPUs do not fit actor.tensor_parallel 2"),
        (["model.path=models/none"], "no config of the model: looked for models/none/config.json"),
        (["--model-config", "nowhere.json"], "looked for nowhere.json"),
        (["actor.tensor_parallel=3"], "actor.tensor_parallel: 3 does not fit"),
        (["actor.expert_parallel=2"], "the model has no experts"),
        (["--mean-response-tokens", "0"], "--mean-response-tokens: 0"),
    ],
)
def test_mistakes_are_named(words, message, capsys, monkeypatch):
    from megatron_opo.cli import main

    monkeypatch.chdir(RECIPES.parent)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "recipes/opo_7b.yaml", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_config_may_stand_in_the_model_directory_or_be_given(tmp_path):
    own = tmp_path / "model"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(config_of("Qwen3-30B-A3B")))
    recipe = load_recipe(RECIPES / "opo_7b.yaml", [f"model.path={own}"])
    assert planner.find_config(recipe, RECIPES / "opo_7b.yaml", None)[0] == own / "config.json"
    given = RECIPES / "models" / "Qwen3-30B-A3B.json"
    assert planner.find_config(recipe, RECIPES / "opo_7b.yaml", given)[0] == given
    (own / "config.json").write_text("{")
    with pytest.raises(RecipeError, match="not valid JSON"):
        planner.find_config(recipe, RECIPES / "opo_7b.yaml", None)


def test_a_network_may_be_given_by_its_speed():
    assert find_network("400").link == NETWORKS["ib-ndr"].link == 50e9
    assert find_gpu("H200", 96).memory == 96 * GIB
    cluster = Cluster(GPUS["h100"], find_network("200"), 2, 8)
    assert (cluster.between(8), cluster.between(16)) == (450e9, 25e9)
    assert math.isclose(cluster.gpus, cluster.trainer_gpus)
