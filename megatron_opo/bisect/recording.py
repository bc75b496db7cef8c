"""What one side computed for some sequences."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequences:
    """Prompts and the responses that a server sampled; of each response all but the last token is
    computed by a decode. `logprobs` are those that the server told."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    temperature: float

    @property
    def computed(self) -> list[tuple[int, ...]]:
        """Of each sequence the tokens whose values both sides compute: all but the last."""
        return [p + r[:-1] for p, r in zip(self.prompts, self.responses, strict=True)]

    @property
    def is_decoded(self) -> torch.Tensor:
        """[T] of all computed tokens, sequence by sequence: false for the prompts'."""
        parts = [
            torch.arange(len(tokens)) >= len(prompt)
            for prompt, tokens in zip(self.prompts, self.computed, strict=True)
        ]
        return torch.cat(parts)

    @property
    def predicts(self) -> torch.Tensor:
        """[T]: does a token of the response follow?"""
        parts = [
            torch.arange(len(tokens)) >= len(prompt) - 1
            for prompt, tokens in zip(self.prompts, self.computed, strict=True)
        ]
        return torch.cat(parts)


# By the title of an operation, [T, channels] of all computed tokens, sequence by sequence; of
# logits and logprobs only the rows at which a response's token is predicted.
Recording = dict[str, torch.Tensor]
