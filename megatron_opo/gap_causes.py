"""Why do servers and trainer disagree? Patterns in the gaps between their logprobs.

A change of one size in all logits moves the logprob of a token by up to that size where the policy
is undecided, and not at all where it is certain: by sqrt(1 - 2 p + sum_v p_v^2) times it, in the
mean. So gaps are divided by this, and tokens that are nearly certain are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

# Fewer tokens than this show no pattern; of more than that, some are enough.
FEWEST, MOST = 32, 20_000
# One number that explains as many gaps is no accident.
FEWEST_GAPS = 12
LEAST_SPREAD = 0.05
# Between what is right and what is not.
APART = 10.0
# A gap that is this much smaller before some position is none.
NONE_BEFORE = 30.0
EARLIEST_ONSET = 16
# A share of the tokens that is few.
SPARSE = 0.05
# Share of the gap that another temperature must explain.
EXPLAINED = 0.75
# What rounding changes logits by, at most: its median over the tokens.
ROUNDING = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens, each field [n].

    `actor` and `server` are their logprobs; `entropy` and `sum_squared_probs` are of the actor's
    distribution. `position` counts from the first token of the prompt, `place` from the first one
    of the response. `origin` is the number of the server; `cached` says whether it had a part of
    the prompt in its cache.
    """

    actor: torch.Tensor
    server: torch.Tensor
    entropy: torch.Tensor
    sum_squared_probs: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    origin: torch.Tensor
    cached: torch.Tensor

    def __len__(self) -> int:
        return self.actor.numel()

    def where(self, which: torch.Tensor) -> "Tokens":
        return Tokens(*(getattr(self, field.name)[which] for field in fields(self)))

    @property
    def spread(self) -> torch.Tensor:
        """[n]: how far a change of the logits by 1 moves the logprob."""
        return (1 - 2 * self.actor.exp() + self.sum_squared_probs).clamp_min(0).sqrt()

    @property
    def size(self) -> torch.Tensor:
        """[n]: how large a change of the logits the gap speaks of."""
        return (self.server - self.actor).abs() / self.spread


def causes(tokens: Tokens, servers: Sequence[str], *, temperature: float, dtype: str) -> list[str]:
    """What the gaps look like, in sentences; none where they look like rounding, or where there
    are too few tokens to tell.

    Args:
        servers: names, by `Tokens.origin`.
        temperature: the recipe's.
        dtype: the model's, as the recipe says it.
    """
    every = finite(tokens)
    tokens = every.where(every.spread > LEAST_SPREAD)
    found = []
    floor = ROUNDING[dtype]
    if apart := servers_apart(tokens, floor):
        names = ", ".join(servers[each] for each in apart)
        found.append(
            f"all tokens that differ were sampled by {names}, and the others' agree: stale or "
            "damaged weights there, or another version or option of SGLang"
        )
        every, tokens = (
            each.where(torch.isin(each.origin, torch.tensor(apart))) for each in (every, tokens)
        )
    patterns = (
        lambda: after_cache_hits(tokens, floor),
        lambda: decode_or_prefill(tokens, floor),
        lambda: from_a_position_on(tokens, floor),
        lambda: grows_with_position(tokens, floor),
        lambda: unrelated(tokens),
        lambda: other_weights(tokens, dtype),
        lambda: few_tokens(tokens, floor),
    )
    if text := other_temperature(every, temperature, floor):
        return [*found, text]
    if len(tokens) >= FEWEST:
        found += [text for pattern in patterns if (text := pattern())][:1]
    return found


def finite(tokens: Tokens) -> Tokens:
    """Those whose logprobs are numbers; not more than are needed."""
    tokens = tokens.where((tokens.server - tokens.actor).isfinite())
    if len(tokens) <= MOST:
        return tokens
    return tokens.where(torch.linspace(0, len(tokens) - 1, MOST).long())


def servers_apart(tokens: Tokens, floor: float) -> list[int]:
    """Numbers of the servers whose tokens differ by far more than those of others."""
    sizes = {
        each: _median(tokens.size[tokens.origin == each])
        for each in tokens.origin.unique().tolist()
        if (tokens.origin == each).sum() >= FEWEST
    }
    worst = max(sizes.values(), default=0.0)
    if len(sizes) < 2 or not _is_apart(min(sizes.values()), worst, floor):
        return []
    return [each for each, size in sizes.items() if size > worst / APART**0.5]


def other_temperature(tokens: Tokens, temperature: float, floor: float) -> str:
    """Of all tokens, also those that are nearly certain. At 1/b of the temperature a logprob is
    b log p - log sum_v p_v^b. Of the sum three things are known: its value at b = 1, its slope
    there (the entropy) and its value at b = 2."""
    gap = tokens.server - tokens.actor
    if (gap.abs() > floor).sum() < FEWEST_GAPS:
        return ""
    curvature = tokens.sum_squared_probs.log() + tokens.entropy
    step = torch.linspace(-1.2, 1.2, 241, dtype=torch.float64).exp()[:, None] - 1  # b - 1
    step = step[step[:, 0].abs() > 0.01]
    expected = step * (tokens.actor + tokens.entropy) - step**2 * curvature
    left = (gap - expected).abs().sum(1)
    best = int(left.argmin())
    if left[best] > (1 - EXPLAINED) * gap.abs().sum():
        return ""
    there = temperature / (1 + step[best].item())
    return (
        f"the gap is that of another temperature: as if the servers told logprobs at {there:.2g}, "
        f"where the recipe samples at {temperature:g}. Compare rollout.temperature with "
        "sampling options in rollout.server_args and generation_config.json; a server with "
        "SGLANG_RETURN_ORIGINAL_LOGPROB in its environment tells them at 1"
    )


def after_cache_hits(tokens: Tokens, floor: float) -> str:
    found, without = tokens.size[tokens.cached], tokens.size[~tokens.cached]
    if min(len(found), len(without)) < FEWEST:
        return ""
    if not _is_apart(_median(without), _median(found), floor):
        return ""
    return (
        "only responses differ whose prompts the server found in its cache: it kept some from "
        "before the weights changed, or computes them otherwise. Try rollout.server_args."
        "disable_radix_cache=true"
    )


def decode_or_prefill(tokens: Tokens, floor: float) -> str:
    """A response's first token comes from the pass over the prompt. Compared at equal positions, as
    far as there are any; at position 1 there is nothing to attend to but one token."""
    tokens = tokens.where(tokens.position > 1)
    is_first = tokens.place == 0
    first, others = tokens.where(is_first), tokens.where(~is_first)
    if len(first) < FEWEST // 2 or len(others) < FEWEST:
        return ""
    low, high = first.position.min(), first.position.max()
    near = others.where((others.position >= low) & (others.position <= high + 8))
    if len(near) < FEWEST // 2:
        return ""
    prefill, decode = _median(first.size), _median(near.size)
    if _is_apart(prefill, decode, floor):
        return (
            "the first token of each response agrees, and those after it do not: the servers "
            "decode otherwise than they compute a prompt. Look at attention_backend, the "
            "kv cache's dtype (kv_cache_dtype) and CUDA graphs in rollout.server_args"
        )
    if _is_apart(decode, prefill, floor):
        return (
            "the first token of each response differs, and those after it agree: the servers "
            "compute prompts otherwise than they decode. Look at attention_backend, "
            "chunked_prefill_size and CUDA graphs in rollout.server_args"
        )
    return ""


def from_a_position_on(tokens: Tokens, floor: float) -> str:
    if len(tokens) <= 2 * FEWEST:
        return ""
    order = tokens.position.argsort()
    positions, sizes = tokens.position[order], tokens.size[order]
    places = torch.linspace(FEWEST, len(tokens) - FEWEST, 64).long()
    best, onset = 0.0, 0
    for start in positions[places].unique().tolist():
        first = int(torch.searchsorted(positions, start))
        if start < EARLIEST_ONSET or first < FEWEST:
            continue
        before, after = sizes[:first].quantile(0.9).item(), _median(sizes[first:])
        ratio = after / max(before, 1e-12)
        if after > floor and ratio > best:
            best, onset = ratio, start
    if best < NONE_BEFORE:
        return ""
    return (
        f"tokens agree up to about position {onset}, and differ from there on: a sliding window, "
        "a longest context (max_position_embeddings, context_length), chunked prefill, or a rope "
        "scaling that begins there"
    )


def grows_with_position(tokens: Tokens, floor: float) -> str:
    """Median over octaves of positions: 1, 2 to 3, 4 to 7 and so on."""
    octaves = tokens.position.clamp_min(1).double().log2().floor().long()
    counted = [each for each in octaves.unique().tolist() if (octaves == each).sum() >= FEWEST // 2]
    sizes = torch.tensor([_median(tokens.size[octaves == each]) for each in counted])
    if len(counted) < 3 or sizes.max() <= max(floor, 4 * sizes[0].item()):
        return ""
    ranks = torch.stack([torch.arange(len(counted)), sizes.argsort().argsort()]).double()
    if torch.corrcoef(ranks)[0, 1] < 0.7:
        return ""
    return (
        f"the gap grows with the position (changes of the logits by {sizes[0]:.2g} before "
        f"position {2 ** (counted[0] + 1)}, by {sizes[-1]:.2g} from {2 ** counted[-1]} on): one "
        "side rotates queries and keys by other angles. Compare rope_theta and rope_scaling "
        "(rope_parameters) of config.json with json_model_override_args in rollout.server_args"
    )


def unrelated(tokens: Tokens) -> str:
    both = torch.stack([tokens.server, tokens.actor])
    less = (tokens.server - tokens.actor).mean().item()
    correlation = torch.corrcoef(both)[0, 1].nan_to_num().item()
    if less < 0.5 or correlation > 0.5:
        return ""
    return (
        f"the two logprobs have little to do with each other (correlation {correlation:.2f}), "
        "at all positions: these are not the same models. An output layer that one side ties "
        "to the embedding and the other does not (tie_word_embeddings), another checkpoint, or a "
        "weight map that does not fit the model"
    )


def other_weights(tokens: Tokens, dtype: str) -> str:
    size = _median(tokens.size)
    if size <= ROUNDING[dtype]:
        return ""
    return (
        f"the gap is alike for all kinds of tokens, and too large for rounding in {dtype} (a "
        f"change of the logits by {size:.2g}): other weights (an update that the servers missed, "
        "or one by somebody else), or an operation that differs: tools/logprob_bisect.py finds that"
    )


def few_tokens(tokens: Tokens, floor: float) -> str:
    differ = int((tokens.size > floor).sum())
    if not 0 < differ <= SPARSE * len(tokens) or tokens.size.max() < 4 * floor:
        return ""
    return (
        f"only {differ} of {len(tokens)} tokens differ by more than rounding. Where they are of "
        "one sample or one server, its memory was damaged; where they are rare words, look at "
        "their rows of the embedding and of the output layer"
    )


def _median(values: torch.Tensor) -> float:
    return values.median().item() if values.numel() else 0.0


def _is_apart(small: float, large: float, floor: float) -> bool:
    """And not both are rounding."""
    return large > floor and APART * small <= large
