"""What a server is asked and what its answer must be, before anything is trained on it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_opo.batch import Prompt, Sample
from megatron_opo.errors import DataError, OnPolicyError

# A logprob is at most 0; a log-softmax in low precision may end a rounding error above.
LOGPROB_ROUNDING = 1e-3

# What reading a value of unexpected shape raises.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


class BadAnswerError(Exception):
    """An answer that cannot be used; the request is tried again."""


def check_ids(ids, vocab_size: int, what: str) -> None:
    """Refuse what would crash a server.

    Raises:
        DataError: no ids at all, or an id outside the model's vocabulary.
    """
    if not ids:
        raise DataError(f"{what} has no tokens; a prompt needs at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = [i for i in ids if not 0 <= i < vocab_size]
        raise DataError(
            f"{what} holds token id {outside[0]}, but the model's vocabulary has {vocab_size} "
            f"entries (0 to {vocab_size - 1}): the tokenizer does not belong to this model"
        )


def sampling_request(
    prompt: Prompt,
    *,
    count: int,
    seeds: Sequence[int] | None,
    temperature: float,
    top_p: float,
    max_response_tokens: int,
    stop_token_ids: tuple[int, ...],
    stop: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The body of /generate. All that shapes the distribution is said, none left to a default."""
    common = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_new_tokens": 0,
        "max_new_tokens": max_response_tokens,
        "stop_token_ids": list(stop_token_ids),
    }
    if stop:
        # The text that comes back is what the tokens say.
        common |= {"stop": list(stop), "no_stop_trim": True}
    ids: list[Any] = list(prompt.token_ids)
    if seeds is None:
        return {"input_ids": ids, "sampling_params": common | {"n": count}, "return_logprob": True}
    # A server gives all of `n` samples the same seed, so they are asked for one by one.
    return {
        "input_ids": [ids] * count,
        "sampling_params": [common | {"sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
    }


def prefill_request(prompt: Prompt) -> dict[str, Any]:
    """The body of /generate that only has the prompt computed and kept."""
    return {"input_ids": list(prompt.token_ids), "sampling_params": {"max_new_tokens": 0}}


def read_samples(
    answer: Any,
    prompt: Prompt,
    *,
    count: int,
    vocab_size: int,
    server: str,
    version: int | None,
) -> tuple[Sample, ...]:
    """The samples of an answer, indexed 0 to count - 1.

    Args:
        server: its URL.
        version: what every token must have been sampled by; None accepts any.

    Raises:
        BadAnswerError: the answer is malformed, incomplete, empty or aborted.
        OnPolicyError: a token was sampled by other weights than `version`.
    """
    items = [answer] if isinstance(answer, dict) else answer
    if not isinstance(items, list) or len(items) != count:
        found = len(items) if isinstance(items, list) else type(items).__name__
        raise BadAnswerError(f"{found} samples came back, {count} were asked for")
    samples = []
    for index, item in enumerate(items):
        try:
            samples.append(_read_sample(item, prompt, index, vocab_size, server))
        except MALFORMED as error:
            raise BadAnswerError(
                f"sample {index} is malformed: {type(error).__name__}: {error}"
            ) from None
    if version is not None:
        check_versions(samples, version, server)
    return tuple(samples)


def count(answer: Any, tokens: str) -> int:
    """Of all samples of an answer that was read; `tokens` is "completion_tokens" or
    "cached_tokens"."""
    items = [answer] if isinstance(answer, dict) else answer
    return sum(item["meta_info"].get(tokens) or 0 for item in items)


def _read_sample(
    item: Mapping[str, Any], prompt: Prompt, index: int, vocab_size: int, server: str
) -> Sample:
    ids, meta = item["output_ids"], item["meta_info"]
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length"):
        message = meta["finish_reason"].get("message", "")
        raise BadAnswerError(f"sample {index} ended with {finish!r} {message}".rstrip())
    pairs = meta["output_token_logprobs"]
    if not ids:
        raise BadAnswerError(f"sample {index} is empty")
    if not len(ids) == len(pairs) == meta["completion_tokens"]:
        raise BadAnswerError(
            f"sample {index} has {len(ids)} ids, {len(pairs)} logprobs and claims "
            f"{meta['completion_tokens']} tokens"
        )
    logprobs, found = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    _check_tokens(ids, found, vocab_size, f"sample {index}")
    return Sample(
        group_id=prompt.id,
        index=index,
        response_ids=tuple(ids),
        logprobs=_checked_logprobs(logprobs, f"sample {index}"),
        versions=token_versions(meta, len(ids), server),
        finish_reason=finish,
        text=str(item.get("text", "")),
        server=server,
        cached_tokens=count(item, "cached_tokens"),
    )


# There may be millions of tokens in a step: what loops in Python only looks for the one at fault.


def _check_tokens(ids: list[Any], of_logprobs: list[Any], vocab_size: int, what: str) -> None:
    if (
        ids == of_logprobs
        and set(map(type, ids)) == {int}
        and min(ids) >= 0
        and max(ids) < vocab_size
    ):
        return
    for place, (token, of_logprob) in enumerate(zip(ids, of_logprobs, strict=True)):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadAnswerError(
                f"token {place} of {what} is {token!r}, not an id below {vocab_size}"
            )
        if of_logprob != token:
            raise BadAnswerError(
                f"token {place} of {what} is {token}, but its logprob is of {of_logprob}"
            )


def _checked_logprobs(values: list[Any], what: str, first: int = 0) -> tuple[float, ...]:
    """`first` is the place of the first."""
    if not (
        set(map(type, values)) <= {float, int}
        and math.isfinite(sum(values))
        and max(values, default=0) <= LOGPROB_ROUNDING
    ):
        for place, value in enumerate(values, start=first):
            is_number = type(value) in (float, int) and math.isfinite(value)
            if not is_number or value > LOGPROB_ROUNDING:
                raise BadAnswerError(
                    f"token {place} of {what} has the logprob {value!r}, not a finite number up "
                    "to 0"
                )
    return tuple(map(float, values))


def token_versions(meta: Mapping[str, Any], length: int, server: str) -> tuple[int, ...]:
    """The weight version behind each token: from the spans if the server gives them.

    Raises:
        BadAnswerError: the spans do not cover the tokens once each, in order.
        OnPolicyError: a version is not a number, so the weights are of unknown origin.
    """
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise BadAnswerError(f"the weight versions {spans} do not cover {length} tokens")
        versions += [_version_number(span["version"], server)] * (span["end"] - span["start"])
    if len(versions) != length:
        raise BadAnswerError(f"the weight versions {spans} do not cover {length} tokens")
    return tuple(versions)


def _version_number(version: Any, server: str) -> int:
    try:
        return int(str(version))
    except ValueError:
        raise OnPolicyError(
            f"server {server} reports weight version {version!r}, which is not one of this "
            "trainer's numbers: its weights are of unknown origin or half replaced. Sync the "
            "weights first"
        ) from None


def check_versions(samples: list[Sample], version: int, server: str) -> None:
    """Raises OnPolicyError if any token was sampled by other weights than `version`."""
    for sample in samples:
        if set(sample.versions) != {version}:
            raise OnPolicyError(
                f"server {server}, prompt {sample.group_id}, sample {sample.index}: tokens were "
                f"sampled by weight versions {sorted(set(sample.versions))}, not by the current "
                f"{version}; training on them would not be on-policy. Does another trainer "
                "update this server?"
            )


def read_prefill_logprobs(answer: Any, ids: list[int]) -> list[float]:
    """[len(ids) - 1] logprobs of ids[1:], each given the ids before it.

    Raises:
        BadAnswerError: the answer is malformed, or is about other tokens.
    """
    try:
        pairs = answer["meta_info"]["input_token_logprobs"]
        found = [pair[1] for pair in pairs]
        values = [pair[0] for pair in pairs]
    except MALFORMED as error:
        raise BadAnswerError(f"malformed: {type(error).__name__}: {error}") from None
    if found != ids:
        raise BadAnswerError(f"logprobs of {len(found)} other tokens than the {len(ids)} sent")
    return list(_checked_logprobs(values[1:], "the text", first=1))
