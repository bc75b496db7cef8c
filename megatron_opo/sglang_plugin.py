"""A plugin of SGLang, run inside its server processes on a CPU. The trainer asks for each part by
an environment variable; any other server in the same environment is left alone.

Reproducible sampling: SGLang's own deterministic mode has no operations for CPUs. With these, a
token and its logprob are a function of weights, prompt and seed alone: whatever else is in the
batch, in the cache, or on the machine.

Quickness: the processes of a server are forked, so that only the first one imports SGLang, and what
a weight update needs again for each of its messages is kept.

Shared memory under the server's own name, so that whoever ends it knows what to remove.
"""

import multiprocessing
import os
import pkgutil
from collections.abc import Callable
from hashlib import blake2b
from importlib.metadata import entry_points

import torch
from torch.nn.functional import silu

from megatron_opo import attention_kernel, invariant

VARIABLE = "MEGATRON_OPO_DETERMINISTIC_CPU"
QUICK_VARIABLE = "MEGATRON_OPO_QUICK"
SHARED_NAME_VARIABLE = "MEGATRON_OPO_SHARED_NAME"
BACKEND = "torch_native"


def is_installed() -> bool:
    """Will SGLang find it in this environment?"""
    found = entry_points(group="sglang.srt.plugins")
    return any(point.module == __name__ for point in found)


def register() -> None:
    """SGLang's plugin hook."""
    if SHARED_NAME_VARIABLE in os.environ:
        for target in SHARED_NAMES:
            _hook(target, own_name, "AROUND")
    if os.environ.get(QUICK_VARIABLE):
        _hook(BEFORE_CHILDREN, fork_children, "AFTER")
        _hook(AFTER_WARMUP, do_nothing, "REPLACE")
        _hook(BEFORE_LOADING, ask_once, "AROUND")
        _hook(LOADING, keep_open, "AROUND")
    if VARIABLE in os.environ:
        _register_operations()


def _hook(target: str, function: Callable, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind])


def own_name(original: Callable[[str], str], what: str) -> str:
    """SGLang's names have a random number or that of a process."""
    return original(f"{os.environ[SHARED_NAME_VARIABLE]}_{what}")


def fork_children(*_) -> None:
    """The process has one thread then, and has computed nothing."""
    multiprocessing.set_start_method("fork", force=True)


def do_nothing(*_) -> None:
    """A server without a warm-up asks itself for something before it listens, and logs how that
    failed. The trainer asks for it later."""


def ask_once(original: Callable, model: torch.nn.Module) -> str | None:
    """Whether a model can be given weights is settled at its start; SGLang walks over its modules
    for each message."""
    if model not in _ANSWERS:
        _ANSWERS[model] = original(model)
    return _ANSWERS[model]


def keep_open(original: Callable, updater, flattened_tensor_bucket_dict: dict) -> tuple[bool, str]:
    """The memory that weights come in stays mapped until some comes in another: to map it anew for
    each message, page by page, takes as long as to read it."""
    _KEPT_OPEN[:] = [flattened_tensor_bucket_dict["flattened_tensor"].untyped_storage()]
    return original(updater, flattened_tensor_bucket_dict)


def _register_operations() -> None:
    from sglang.srt.arg_groups import choices

    for target, replacement in REPLACED.items():
        pkgutil.resolve_name(target)
        _hook(target, replacement, "REPLACE")
    # Last: whatever failed before, the server then refuses to start in deterministic mode.
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])


def enable_batch_invariant_mode(*_) -> None:
    """Norms, softmax and activations work row by row already; only products do not."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops

    invariant.check()
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::mm", invariant.matmul, "CPU")
    library.impl("aten::addmm", _addmm, "CPU")
    batch_invariant_ops._batch_invariant_LIB = library
    batch_invariant_ops._batch_invariant_MODE = True


def _addmm(bias, rows, matrix, *, beta=1, alpha=1):
    """Megatron adds the bias afterwards, too."""
    product = invariant.matmul(rows, matrix)
    return product + bias if beta == alpha == 1 else product * alpha + bias * beta


def normalize(norm, x, residual=None, post_residual_addition=None, quant_linear=None):
    """What is added is rounded before it is normalised, as in Megatron and in transformers."""
    if norm.variance_size_override is not None or quant_linear is not None:
        raise NotImplementedError("reproducible sampling is for models with plain norms")
    if residual is None:
        return invariant.rms_norm(x, norm.weight, norm.variance_epsilon)
    residual = x + residual
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return invariant.rms_norm(residual, norm.weight, norm.variance_epsilon), residual


def compute_experts(layer, x: torch.Tensor, topk_output, moe_runner_config) -> torch.Tensor:
    """[tokens, channels], in Megatron's order: a token's weight goes into its expert's last
    product, and results are added up from the first expert to the last."""
    if moe_runner_config.activation != "silu" or moe_runner_config.apply_router_weight_on_input:
        raise NotImplementedError("reproducible sampling is for experts with plain silu gates")
    weights, chosen, _ = topk_output
    results, rows = [], []
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ layer.w13_weight[expert].t()).chunk(2, -1)
        inner = silu(gate) * up
        inner = (inner * weights[tokens, places, None]).to(x.dtype)
        results.append(inner @ layer.w2_weight[expert].t())
        rows.append(tokens)
    targets = torch.cat(rows)[:, None].expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_add_(0, targets, torch.cat(results))


def attend_extend(
    _backend,
    query: torch.Tensor,  # [tokens, heads, channels] of all sequences, one after the other
    output: torch.Tensor,
    k_cache: torch.Tensor,  # [slots, key-value heads, channels]
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,  # [requests, places]: slots
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens=None,
    scaling: float = 1.0,
    sliding_window_size: int | None = None,
    **_,
) -> torch.Tensor:
    _refuse_encoder(encoder_lens)
    counts = extend_seq_lens.long()
    ends = counts.cumsum(0)
    # The first token of a sequence is at position `prefix`, and those after it follow.
    shift = extend_prefix_lens - (ends - counts)
    positions = torch.arange(len(query)) + shift.repeat_interleave(counts)
    requests = req_pool_indices.repeat_interleave(counts)
    cache = k_cache, v_cache, req_to_token
    attention_kernel.best()(
        query, output, *cache, requests, positions, scaling, sliding_window_size
    )
    return output


def attend_decode(
    _backend,
    query: torch.Tensor,  # [requests, heads, channels]
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens=None,
    scaling: float = 1.0,
    sliding_window_size: int | None = None,
    **_,
) -> torch.Tensor:
    _refuse_encoder(encoder_lens)
    cache, positions = (k_cache, v_cache, req_to_token), seq_lens - 1
    attention_kernel.best()(
        query, output, *cache, req_pool_indices, positions, scaling, sliding_window_size
    )
    return output


def _refuse_encoder(encoder_lens) -> None:
    if encoder_lens is not None:
        raise NotImplementedError("reproducible sampling is for models without an encoder")


def sample(
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows] int32: a token of each row of probs [rows, V], by its seed and position alone."""
    assert sampling_seed is not None and positions is not None
    cumulative = probs.double().cumsum(-1)
    drawn = _uniform(sampling_seed, positions)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, drawn, right=True)
    # Past the end only where probabilities are not finite, which the trainer will refuse.
    return tokens.clamp_(max=probs.shape[1] - 1)[:, 0].to(torch.int32)


def sample_truncated(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    _need_min_p: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    **_,
) -> torch.Tensor:
    """`sample` from what top-k, top-p and min-p leave. A row without any of them gets the token
    that it gets in a batch in which no row has one.

    A server that was asked for one truncated token, perhaps by a look at its health, may call this
    from then on, also for batches in which no row is: only those that are truncated are sorted."""
    cut = ((top_ks < probs.shape[1]) | (top_ps < 1) | (min_ps > 0)).nonzero()[:, 0]
    if len(cut):
        kept = _truncate(probs[cut], top_ks[cut, None], top_ps[cut, None], min_ps[cut, None])
        probs = probs.index_copy(0, cut, kept)
    return sample(probs, sampling_seed, positions)


def _truncate(probs, top_k, top_p, min_p) -> torch.Tensor:
    """[rows, V], each limit [rows, 1]; what is not left is zero."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    drop = torch.arange(probs.shape[1]) >= top_k
    drop |= (before > top_p) & (top_p < 1)
    drop |= ordered < ordered[:, :1] * min_p
    return torch.empty_like(probs).scatter_(-1, ids, ordered.masked_fill(drop, 0))


def _uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] float64 in [0, 1), of 52 bits: times any sum, it stays below that sum."""
    words = [
        int.from_bytes(blake2b(b"%d %d" % pair, digest_size=8).digest(), "big") >> 12
        for pair in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor(words, dtype=torch.float64) * 2.0**-52


# Of the file in which a scheduler tells its load, and of queues between processes.
SHARED_NAMES = [
    "sglang.srt.managers.load_snapshot.shm_path_for",
    "sglang.srt.utils.stale_shm_cleanup.make_shm_name",
]
_ANSWERS: dict[torch.nn.Module, str | None] = {}
_KEPT_OPEN: list[torch.UntypedStorage] = []
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater."
BEFORE_LOADING = _UPDATER + "_unsupported_derived_weight_cache_error"
LOADING = _UPDATER + "WeightUpdater._update_weights_from_flattened_bucket"
# Where SGLang decides how its processes are started.
BEFORE_CHILDREN = "sglang.srt.entrypoints.engine._set_envs_and_config"
AFTER_WARMUP = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
REPLACED = {
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": enable_batch_invariant_mode,
    "sglang.srt.layers.layernorm.RMSNorm.forward_native": normalize,
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": compute_experts,
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    "._run_sdpa_forward_extend": attend_extend,
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    "._run_sdpa_forward_decode": attend_decode,
    "sglang.srt.layers.sampler.sampling_from_probs_torch": sample,
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": sample_truncated,
}
