"""What is said of a batch on which servers and trainer disagree: its worst tokens, as text, with
where they come from, and what the gaps look like."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_opo.batch import Group, PackedBatch, Sample
from megatron_opo.gap_causes import ROUNDING, Tokens, causes
from megatron_opo.on_policy import agreement_metrics, disagreement, worst_tokens
from megatron_opo.recipe import Recipe

Decode = Callable[[tuple[int, ...]], str]
TEXT_BEFORE = 24
BISECT = "tools/logprob_bisect.py"


class TokenScores(Protocol):
    """What the actor says of each token of a batch, [T] each."""

    @property
    def logprobs(self) -> torch.Tensor: ...
    @property
    def entropy(self) -> torch.Tensor: ...
    @property
    def sum_squared_probs(self) -> torch.Tensor: ...


def describe_gap(
    batch: PackedBatch,
    scores: TokenScores,
    groups: Sequence[Group],
    recipe: Recipe,
    decode: Decode | None,
    weights_differ: str | None,
) -> str:
    """The message of the error that stops the run.

    Args:
        groups: that the batch was packed of; none where they are not known.
        decode: of token ids; None leaves texts out.
        weights_differ: in what way servers hold other weights than they were sent, "" if they hold
            the same ones; None where they could not be asked.
    """
    samples = [sample for group in groups for sample in group.samples]
    max_gap, mean_gap = recipe.algorithm.gap_bounds
    metrics = agreement_metrics(batch, scores.logprobs)
    problem = disagreement(metrics, max_gap=max_gap, mean_gap=mean_gap)
    lines = [
        f"{problem} The worst tokens:",
        *(
            describe_token(batch, scores.logprobs, place, samples, decode)
            for place in worst_tokens(batch, scores.logprobs)
        ),
    ]
    tokens, servers = tokens_of(batch, scores, samples)
    found = causes(
        tokens, servers, temperature=recipe.rollout.temperature, dtype=recipe.model.dtype
    )
    if weights_differ:
        lines.append(f"Servers hold other weights than they were sent:\n{weights_differ}")
    elif not found:
        largest = (scores.logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()
        dtype = recipe.model.dtype
        if largest <= 4 * ROUNDING[dtype]:
            lines.append(f"The gaps show no pattern: so does rounding in {dtype}.")
        else:
            lines.append(f"The gaps show no known pattern, and are no rounding in {dtype}.")
        lines[-1] += f" {BISECT} names the first operation that differs."
    lines += [f"Likely cause: {each}." for each in found]
    if weights_differ == "":
        lines.append("The servers hold the weights that they were sent: compared once more.")
    return "\n".join(lines)


def describe_token(
    batch: PackedBatch,
    logprobs: torch.Tensor,
    place: int,
    samples: Sequence[Sample],
    decode: Decode | None,
) -> str:
    """One line about the token at `place` of the batch. `samples` are those of the whole rollout;
    none where they are not known."""
    sequence = int(torch.searchsorted(batch.cu_seqlens, place, right=True)) - 1
    start = int(batch.cu_seqlens[sequence])
    number = int(batch.sample_ids[sequence])
    token = int(batch.tokens[place])
    text = ""
    if decode is not None:
        before = tuple(batch.tokens[max(start, place - TEXT_BEFORE) : place].tolist())
        text = f" {decode((token,))!r} after {decode(before)[-TEXT_BEFORE:]!r}"
    line = (
        f"  sample {number}, position {place - start}, token {token}{text}: actor "
        f"{logprobs[place]:.5f}, server {batch.rollout_logprobs[place]:.5f}"
    )
    if number < len(samples):
        sample = samples[number]
        response = int(batch.cu_seqlens[sequence + 1]) - len(sample.response_ids)
        line += f", sampled by {sample.server} as version {sample.versions[place - response]}"
    return line


def tokens_of(
    batch: PackedBatch, scores: TokenScores, samples: Sequence[Sample]
) -> tuple[Tokens, list[str]]:
    """The loss tokens, and the names of the servers that sampled them."""
    mask = batch.loss_mask
    sequence = torch.arange(batch.num_sequences).repeat_interleave(batch.sequence_lengths)
    position = torch.arange(batch.tokens.numel()) - batch.cu_seqlens[:-1][sequence]
    # Of each sequence its first loss token.
    first = torch.full((batch.num_sequences,), batch.tokens.numel())
    first.scatter_reduce_(0, sequence[mask], position[mask], "amin")
    of_sequence = [samples[i] if i < len(samples) else None for i in batch.sample_ids.tolist()]
    urls = [sample.server if sample else "unknown" for sample in of_sequence]
    servers = sorted(set(urls))
    origin = torch.tensor([servers.index(url) for url in urls])
    cached = torch.tensor([bool(sample and sample.cached_tokens) for sample in of_sequence])
    tokens = Tokens(
        actor=scores.logprobs[mask].double(),
        server=batch.rollout_logprobs[mask].double(),
        entropy=scores.entropy[mask].double(),
        sum_squared_probs=scores.sum_squared_probs[mask].double(),
        position=position[mask],
        place=(position - first[sequence])[mask],
        origin=origin[sequence][mask],
        cached=cached[sequence][mask],
    )
    return tokens, servers
