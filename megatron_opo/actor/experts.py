"""Mixture of experts in Megatron: what its config says of it, and how tokens are routed."""

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opo.recipe import ActorConfig
from megatron_opo.weights.families import Architecture


class Router(TopKRouter):
    """Routes as the Hugging Face models and the servers do: logits in the model's dtype, all that
    follows in float32.

    Megatron's own either rounds the probabilities too, or (moe_router_dtype) has logits that are
    not rounded, and then chooses other experts than the servers wherever bfloat16 decides.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Megatron creates it on the CPU and moves it when the first token comes.
        self.weight.data = self.weight.data.to(torch.cuda.current_device())

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight).float()


class NormalizingRouter(Router):
    """Then the chosen experts' probabilities are divided by their sum. Megatron's own way, a
    softmax of the chosen experts' logits, has other last digits."""

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, chosen = super().routing(*args, **kwargs)
        total = probabilities.topk(self.topk, dim=-1).values.sum(-1, keepdim=True)
        return probabilities / total, chosen


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def expert_fields(architecture: Architecture, actor: ActorConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that the model and exactness decide."""
    experts = architecture.experts
    if experts is None or not experts.layers:
        return {}
    mixed = len(experts.layers) < architecture.layers
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(i in experts.layers) for i in range(architecture.layers)]
        if mixed
        else 1,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_force_load_balancing": False,
        # Every token reaches its experts, and the loss is the policy gradient's alone.
        "moe_expert_capacity_factor": None,
        "moe_token_dropping": False,
        "moe_input_jitter_eps": None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_apply_probs_on_input": False,
        "expert_model_parallel_size": actor.expert_parallel,
        "expert_tensor_parallel_size": actor.expert_tensor_size,
        # Transformer Engine computes a rank's experts in one go. Without it they follow each other,
        # on any backend and in any dtype; Megatron's other grouped module does neither.
        "moe_grouped_gemm": has_transformer_engine(),
    }


def layers_with_experts(config: TransformerConfig) -> list[bool]:
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, list):
        return [bool(each) for each in config.moe_layer_freq]
    return [True] * config.num_layers


def mark_experts(model: torch.nn.Module) -> None:
    """Say that gradients of experts are summed over the ranks that hold copies of these experts.

    Megatron does so only with expert_parallel > 1, and else sums them as all others: copies that
    tensor-parallel ranks hold (expert_tensor_parallel < tensor_parallel) would drift apart. It also
    keeps experts in an optimizer of their own then, which checkpoints of all layouts should have.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def router_of(architecture: Architecture) -> type[Router]:
    normalize = architecture.experts is not None and architecture.experts.normalize
    return NormalizingRouter if normalize else Router


def use_router(layer: ModuleSpec, router: type[Router]) -> None:
    """Put it into the spec of a layer with experts."""
    of_layer: Any = layer.submodules
    mlp = of_layer.mlp
    # Newer Megatron versions have a partial function in the place of a spec.
    of_mlp: Any = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    of_mlp.router = router
