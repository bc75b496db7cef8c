"""Floating-point operations, two for each multiply-add, from the exact shapes of the weights."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_opo.plan.layout import Model


@dataclass(frozen=True)
class Flops:
    """Of a forward pass: products with the layers' weights, attention between tokens, and the
    output layer over the scored tokens."""

    layers: float
    attention: float
    head: float

    @property
    def forward(self) -> float:
        return self.layers + self.attention + self.head

    @property
    def model(self) -> float:
        """Forward and backward as MFU counts them: the backward pass is twice the forward."""
        return 3 * self.forward

    def computed(self, recompute: bool) -> float:
        """Forward and backward as the actor computes them. Logits are made a second time in the
        backward pass; fused attention makes its scores again there (5 products instead of 4); full
        recompute repeats the layers' forward pass."""
        backward = 2 * self.layers + 2.5 * self.attention + 3 * self.head
        again = self.layers + self.attention if recompute else 0
        return self.forward + backward + again


def active_weights(model: Model) -> int:
    """Elements of the layers' matrices that a token is multiplied with."""
    experts = model.architecture.experts
    per_token = experts.per_token if experts else 0
    return sum(
        weight.numel * (per_token if weight.expert else 1)
        for layer in model.layers
        for weight in layer
        if weight.is_matrix
    )


def forward_flops(model: Model, lengths: Iterable[int], scored: int, causal: bool = True) -> Flops:
    """A forward pass over sequences of the given lengths, `scored` of whose tokens get logits.

    `causal` counts only the pairs of tokens that attend to each other; without it the full square,
    as implementations compute it that mask its half out.
    """
    a = model.architecture
    lengths = list(lengths)
    pairs = 0
    for window in set(a.windows):
        layers = a.windows.count(window)
        pairs += layers * sum(_pairs(n, window) if causal else n * n for n in lengths)
    return Flops(
        layers=2 * sum(lengths) * active_weights(model),
        attention=4 * pairs * a.heads * a.head_dim,
        head=2 * scored * model.embedding.numel,
    )


def _pairs(length: int, window: int | None) -> int:
    """How many (query, key) pairs causal attention has."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
