"""Bytes that the actor keeps and works in between a forward pass and its backward pass.

Each function follows the tensors that autograd saves in the actor's own layers, by name, so that a
test can hold the sum against what torch really saves.
"""

from dataclasses import dataclass

from megatron_opo.plan.assumptions import EXPERT_IMBALANCE
from megatron_opo.plan.layout import BYTES, Chunk, Layout, Model

FLOAT = 4
INDEX = 8


@dataclass(frozen=True)
class Pass:
    """One packed micro-batch. `tokens` as the model sees them on one of its context-parallel ranks,
    of which `scored` have a loss.

    `engine` says whether Transformer Engine computes norms and attention, as on a GPU; without it
    (the float32 of a CPU) norms keep one more tensor, and attention a copy of keys and values for
    every head, those of other context-parallel ranks among them."""

    tokens: int
    scored: int
    dtype: str
    engine: bool
    recompute: bool

    @property
    def width(self) -> int:
        return BYTES[self.dtype]


def rows_per_rank(tokens: int, layout: Layout) -> float:
    """Tokens of the residual stream on one rank: sequence parallelism splits them."""
    return tokens / layout.tensor if layout.sequence_parallel else tokens


def layer_saved(model: Model, layout: Layout, experts: bool, step: Pass) -> dict[str, float]:
    """What a layer, with experts or with a dense MLP, saves for its backward pass: bytes by
    name."""
    architecture = model.architecture
    rows, b = rows_per_rank(step.tokens, layout), step.width
    hidden = architecture.hidden
    norm = rows * _norm_bytes(hidden, step)
    saved = {"norms": 2 * norm, "norm outputs": 2 * rows * hidden * b}
    saved |= _attention_saved(model, layout, step)
    if experts:
        return saved | _experts_saved(model, layout, step)
    ffn = architecture.ffn / layout.tensor
    # Gate and up as they come, silu(gate), up + 0, and their product, which fc2 takes.
    return saved | {"mlp": step.tokens * 5 * ffn * b}


def _norm_bytes(width: float, step: Pass, source: float | None = None) -> float:
    """Of one row: its input and 1 / rms. Our own norm has the input in float32 and keeps the
    normalised input beside it; `source` is the width of the tensor that a float32 input is a view
    of, where it is one."""
    if step.engine:
        return width * step.width + FLOAT
    wide = width if source is None or step.width < FLOAT else source
    return wide * FLOAT + FLOAT + width * step.width


def _attention_saved(model: Model, layout: Layout, step: Pass) -> dict[str, float]:
    a, b, tokens = model.architecture, step.width, step.tokens
    heads = a.heads / layout.tensor
    kv_heads = max(a.kv_heads / layout.tensor, 1)
    q, kv = heads * a.head_dim, kv_heads * a.head_dim
    # What linear_qkv returns. With more ranks than key-value heads it is gathered from all of them.
    gathered = layout.tensor > a.kv_heads
    mixed = (a.heads + 2 * a.kv_heads) * a.head_dim if gathered else q + 2 * kv
    saved: dict[str, float] = {}
    if a.family.qk_norm:
        norm = heads * _norm_bytes(a.head_dim, step)
        norm += kv_heads * _norm_bytes(a.head_dim, step, source=mixed / kv_heads)
        saved["query and key norms"] = tokens * norm
    # Cosine and sine, for queries and for keys.
    saved["rotary angles"] = tokens * 4 * a.head_dim * b
    if step.engine:
        # Values are views of `mixed`, which therefore stays whole.
        saved["attention"] = tokens * (mixed + q + kv + q) * b
    else:
        saved["attention"] = tokens * (3 + 2 * _keys_seen(layout)) * q * b
    saved["attention sums"] = tokens * heads * FLOAT
    return saved


def _keys_seen(layout: Layout) -> float:
    """Copies of keys for each query: its sequence's two chunks have all up to their own end."""
    return layout.context + 0.5 if layout.context > 1 else 1


def _experts_saved(model: Model, layout: Layout, step: Pass) -> dict[str, float]:
    a, b = model.architecture, step.width
    assert a.experts is not None
    rows = rows_per_rank(step.tokens, layout)
    arriving = expert_rows(model, layout, step.tokens)
    ffn = a.experts.ffn / layout.expert_tensor
    # The chosen experts and their order; of all a map, their probabilities and the weights.
    of_row = a.experts.per_token * 2 * INDEX + a.experts.count * (1 + 2 * FLOAT)
    if a.experts.normalize:  # the weights before that, their sum, and of which it is
        of_row += a.experts.count * FLOAT + FLOAT + a.experts.per_token * INDEX
    return {
        "router": rows * of_row,
        "tokens of experts": arriving * (a.hidden * b + FLOAT),
        # As of a dense MLP, and the product once more before the router's weight is applied.
        "experts": arriving * 6 * ffn * b,
    }


def expert_rows(model: Model, layout: Layout, tokens: int) -> float:
    """Rows that the busiest rank's experts compute."""
    experts = model.architecture.experts
    assert experts is not None
    even = rows_per_rank(tokens, layout) * experts.per_token * layout.expert_tensor
    return even * (EXPERT_IMBALANCE.value if layout.expert > 1 else 1)


def chunk_saved(model: Model, layout: Layout, chunk: Chunk, step: Pass) -> float:
    """What one micro-batch keeps of a chunk of layers until its backward pass."""
    rows, b = rows_per_rank(step.tokens, layout), step.width
    hidden = model.architecture.hidden
    total = step.tokens * INDEX if chunk.has_embedding else 0.0  # token ids
    layers = chunk.end - chunk.first
    if step.recompute:
        total += layers * rows * hidden * b
        # Rotary angles, for all layers, and of all ranks' tokens.
        total += step.tokens * layout.context * model.architecture.head_dim * FLOAT
    else:
        if not step.engine:
            # Where padding goes and came from; for keys of other ranks, and where these came from.
            places = 2 + (_keys_seen(layout) + 2 * layout.context if layout.context > 1 else 0)
            total += step.tokens * places * INDEX
        with_experts = sum(map(model.has_experts, range(chunk.first, chunk.end)))
        for experts, count in ((True, with_experts), (False, layers - with_experts)):
            if count:
                total += count * sum(layer_saved(model, layout, experts, step).values())
    if chunk.has_head:
        return total + rows * _norm_bytes(hidden, step)
    return total + rows * hidden * b  # what the next stage was sent


def logits_workspace(model: Model, layout: Layout, chunk_tokens: int, step: Pass) -> float:
    """Peak of scoring a micro-batch on the last stage, beside what its layers saved."""
    hidden, b = model.architecture.hidden, step.width
    # Gathered from the sequence-parallel ranks; and the scored rows.
    gathered = step.tokens * hidden * b if layout.sequence_parallel else 0
    vocabulary = model.embedding.on_rank(layout) // hidden
    peak = chunked_logits_peak(step.scored, hidden, vocabulary, chunk_tokens=chunk_tokens, width=b)
    return gathered + step.scored * hidden * b + peak


def chunked_logits_peak(
    tokens: int, hidden: int, vocabulary: int, *, chunk_tokens: int, width: int
) -> float:
    """Peak bytes of `actor.logprobs`, forward and backward, beside its arguments.

    `vocabulary` rows of the output layer, `width` bytes an element.
    """
    logits = min(chunk_tokens, tokens) * vocabulary
    matrix = vocabulary * hidden
    cast = width if width < FLOAT else 0
    forward = logits * 2 * FLOAT
    backward = matrix * FLOAT + tokens * hidden * width
    backward += max(logits * (FLOAT + cast), logits * width + matrix * width)
    return tokens * 4 * FLOAT + max(forward, backward)


def layer_workspace(model: Model, layout: Layout, step: Pass) -> float:
    """Peak inside the backward pass of a layer, beside what was saved: its recomputed tensors, and
    gradients of its widest ones."""
    a, b = model.architecture, step.width
    rows = rows_per_rank(step.tokens, layout)
    widest, recomputed = 0.0, 0.0
    for experts in {model.has_experts(layer) for layer in range(a.layers)}:
        if experts and a.experts is not None:
            arriving = expert_rows(model, layout, step.tokens)
            mlp = arriving * (4 * a.experts.ffn / layout.expert_tensor + 2 * a.hidden) * b
        else:
            mlp = step.tokens * 4 * a.ffn / layout.tensor * b
        widest = max(widest, mlp)
        if step.recompute:
            saved = sum(layer_saved(model, layout, experts, step).values())
            recomputed = max(recomputed, saved)
    gathered = 2 * step.tokens * a.hidden * b if layout.sequence_parallel else 0
    return recomputed + widest + gathered + 2 * rows * a.hidden * b


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Forward passes of chunks that await their backward pass at the peak of the schedule."""
    if layout.pipeline == 1:
        return 1
    after = layout.pipeline - stage - 1
    if layout.virtual == 1:
        return min(after + 1, micro_batches)
    warm_up = 2 * after + (layout.virtual - 1) * layout.pipeline
    return min(warm_up + 1, micro_batches * layout.virtual)
