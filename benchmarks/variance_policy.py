"""The policy that variance.py measures: exact samples, exact per-sequence gradients, training.

Plain transformers and torch, all on one core. R responses, D parameters, T tokens of a response.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from transformers import DynamicCache

from megatron_opo.advantages.estimators import opo, token_energies
from megatron_opo.recipe import Recipe
from megatron_opo.rewards.verifiers import exact

IGNORED = -100
ROWS_OF_GRADIENTS = 32  # differentiated together

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Example: Question(prompt=(6, 10, 12, 9, 8, 13), answer="124") for "48+76="."""

    prompt: Ids
    answer: str


class Policy:
    """A model with what is needed to sample from it and to score the samples."""

    def __init__(self, model, tokenizer, recipe: Recipe):
        self.model = model
        self.tokenizer = tokenizer
        self.limit = recipe.rollout.max_response_tokens
        self.extract = recipe.reward.kwargs["extract"]

    def text(self, response: Ids) -> str:
        return self.tokenizer.decode(response, skip_special_tokens=True)

    def reward(self, question: Question, response: Ids) -> float:
        return exact("", self.text(response), question.answer, {}, extract=self.extract)


@torch.no_grad()
def sample(
    policy: Policy, questions: Sequence[Question], copies: int, rng: np.random.Generator
) -> list[list[Ids]]:
    """`copies` independent responses to each question, at temperature 1.

    Equal prefixes are one row with a count, whose children are drawn together from a multinomial:
    the same distribution as one by one, at the cost of the different prefixes only.
    """
    found: list[list[Ids]] = [[] for _ in questions]
    for length in sorted({len(question.prompt) for question in questions}):
        asked = [i for i, question in enumerate(questions) if len(question.prompt) == length]
        rows = [(i, (), copies) for i in asked]
        ids = torch.tensor([questions[i].prompt for i in asked])
        cache = DynamicCache(config=policy.model.config)
        for _ in range(policy.limit):
            out = policy.model(input_ids=ids, past_key_values=cache, use_cache=True)
            probs = out.logits[:, -1].double().softmax(-1)
            counts = rng.multinomial([row[2] for row in rows], probs.numpy())
            grown, parents = [], []
            for parent, token in np.argwhere(counts).tolist():
                question, prefix, _ = rows[parent]
                row = (question, (*prefix, token), int(counts[parent, token]))
                if token == policy.tokenizer.eos_token_id:
                    found[question] += [row[1]] * row[2]
                else:
                    grown.append(row)
                    parents.append(parent)
            rows = grown
            if not rows:
                break
            ids = torch.tensor([row[1][-1:] for row in rows])
            cache.reorder_cache(torch.tensor(parents))
        for question, prefix, left in rows:  # cut at the limit
            found[question] += [prefix] * left
    return [[responses[i] for i in rng.permutation(copies)] for responses in found]


def response_rows(
    pairs: Sequence[tuple[Ids, Ids]], pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(prompt, response) pairs -> ids, targets (shifted) and mask of targets, all [R, longest-1].

    Padded on the right, where a causal model does not look.
    """
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.full((len(pairs), width), pad)
    mask = torch.zeros(len(pairs), width, dtype=torch.bool)
    for i, (prompt, response) in enumerate(pairs):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        mask[i, len(prompt) : len(prompt) + len(response)] = True
    return ids[:, :-1], ids[:, 1:], mask[:, 1:]


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def sequence_gradients(policy: Policy, prompt: Ids, responses: Sequence[Ids]) -> torch.Tensor:
    """[R, D] float32: d log p(response | prompt) / d parameters, summed over tokens."""
    parameters = dict(policy.model.named_parameters())

    def logprob(parameters, ids, targets, mask):
        arguments = {"input_ids": ids[None], "use_cache": False}
        out = torch.func.functional_call(policy.model, parameters, (), arguments)
        return (token_logprobs(out.logits[0], targets) * mask).sum()

    gradient = torch.func.vmap(torch.func.grad(logprob), in_dims=(None, 0, 0, 0))
    rows = response_rows([(prompt, response) for response in responses], 0)
    parts = []
    for chunk in zip(*(part.split(ROWS_OF_GRADIENTS) for part in rows), strict=True):
        found = gradient(parameters, *chunk)
        parts.append(torch.cat([part.flatten(1) for part in found.values()], 1).detach())
    return torch.cat(parts)


@torch.no_grad()
def response_energies(policy: Policy, prompt: Ids, responses: Sequence[Ids]) -> torch.Tensor:
    """[R] float64: the sum of `token_energies` over each response, the weights of opo_energy."""
    ids, targets, mask = response_rows([(prompt, response) for response in responses], 0)
    logits = policy.model(input_ids=ids, use_cache=False).logits.double()
    energies = token_energies(token_logprobs(logits, targets), logits.softmax(-1).square().sum(-1))
    return (energies * mask).sum(-1)


def train(
    policy: Policy, questions: Sequence[Question], recipe: Recipe, rng: np.random.Generator
) -> Iterator[float]:
    """OPO as in the recipe, exactly on-policy, under token-mean: one AdamW step a value.

    Yields the mean reward of the step's answers, after its update.
    """
    size, config = recipe.rollout.samples_per_prompt, recipe.optimizer
    optimizer = torch.optim.AdamW(
        policy.model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for step in count():
        drawn = rng.choice(len(questions), recipe.rollout.prompts_per_step, replace=False)
        asked = [questions[i] for i in drawn]
        pairs, rewards = [], []
        for question, responses in zip(asked, sample(policy, asked, size, rng), strict=True):
            pairs += [(question.prompt, response) for response in responses]
            rewards += [policy.reward(question, response) for response in responses]
        lengths = torch.tensor([len(response) for _, response in pairs])
        offsets = torch.arange(0, len(pairs) + 1, size)
        advantages = opo(torch.tensor(rewards), lengths, offsets)
        ids, targets, mask = response_rows(pairs, 0)
        logprobs = token_logprobs(policy.model(input_ids=ids, use_cache=False).logits, targets)
        loss = -(advantages[:, None] * logprobs * mask).sum() / lengths.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1, (step + 1) / max(1, config.warmup_steps))
        optimizer.step()
        optimizer.zero_grad()
        yield float(np.mean(rewards))
