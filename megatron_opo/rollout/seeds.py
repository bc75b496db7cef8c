"""The seed of every sample, from what the sample is for and from nothing else."""

import json
from hashlib import blake2b


def sample_seed(run_seed: int, purpose: str, version: int, prompt_id: str, index: int) -> int:
    """A number of 63 bits; the same in every attempt, order and resumed run.

    Args:
        run_seed: the recipe's.
        purpose: what keeps samples of one prompt by the same weights apart ("train", "eval").
        version: of the weights.
        prompt_id: unique over the run (`Prompt.id`).
        index: of the sample in its group.
    """
    text = json.dumps([run_seed, purpose, version, prompt_id, index])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
