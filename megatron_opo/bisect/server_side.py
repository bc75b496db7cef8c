"""A server, as the recipe has it started, asked for one sequence after the other."""

import json
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_opo.batch import Prompt
from megatron_opo.bisect.operations import LOGITS, LOGPROB, Operation
from megatron_opo.bisect.recording import Recording, Sequences
from megatron_opo.bisect.server_hooks import specs
from megatron_opo.errors import ServerError
from megatron_opo.recipe import Recipe
from megatron_opo.rollout import Server, launch_servers
from megatron_opo.rollout.answers import BadAnswerError, read_samples, sampling_request

LOGITS_MODULE = "logits_processor"
Calls = dict[str, list[dict[str, torch.Tensor]]]


def launch(recipe: Recipe, wanted: Sequence[Operation], scratch: Path, device: str) -> Server:
    """Start a server that records; `rollout.wait_healthy` waits for it."""
    directory = _recordings(scratch)
    directory.mkdir(parents=True)
    modules = {each.server.module for each in wanted if each.server} | {LOGITS_MODULE}
    server_args = recipe.rollout.server_args | {
        "forward_hooks": json.dumps(specs(sorted(modules), directory)),
        # A graph that is replayed runs no hooks.
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        # All tokens of a prompt are computed, and none that nobody asked for.
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
    }
    rollout = recipe.rollout.model_copy(update={"server_args": server_args, "urls": ()})
    (server,) = launch_servers(rollout, recipe.model, scratch, device)
    return server


def _recordings(scratch: Path) -> Path:
    return scratch / "recordings"


@dataclass(frozen=True)
class Asked:
    """What a server said and computed."""

    sequences: Sequences
    recording: Recording


def ask(
    server: Server,
    recipe: Recipe,
    wanted: Sequence[Operation],
    prompts: Sequence[Sequence[int]],
    response_tokens: int,
    scratch: Path,
    vocab_size: int,
) -> Asked:
    """Have a response of `response_tokens` sampled to each prompt (token ids).

    Raises:
        ServerError: no usable answer, or recordings that are not of these tokens.
    """
    directory = _recordings(scratch)
    responses, logprobs = [], []
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for i, ids in enumerate(prompts):
        for old in directory.iterdir():
            old.unlink()
        prompt = Prompt(str(i), tuple(ids), "", "bisect", None)
        sample = _sample(server, recipe, prompt, i, response_tokens, vocab_size)
        responses.append(sample.response_ids)
        logprobs.append(sample.logprobs)
        computed = prompt.token_ids + sample.response_ids[:-1]
        calls = _read_calls(directory)
        _check_tokens(calls, computed, server)
        for operation in wanted:
            if (
                values := _values(operation, calls, len(computed), len(sample.logprobs))
            ) is not None:
                parts[operation.title].append(values)
        parts[LOGPROB].append(torch.tensor(sample.logprobs)[:, None])
    sequences = Sequences(
        tuple(tuple(ids) for ids in prompts),
        tuple(responses),
        tuple(logprobs),
        recipe.rollout.temperature,
    )
    complete = {
        title: torch.cat(each) for title, each in parts.items() if len(each) == len(prompts)
    }
    return Asked(sequences, complete)


def _sample(server, recipe: Recipe, prompt: Prompt, seed: int, count: int, vocab_size: int):
    body = sampling_request(
        prompt,
        count=1,
        seeds=[seed],
        temperature=recipe.rollout.temperature,
        top_p=1.0,
        max_response_tokens=count,
        stop_token_ids=(),
    )
    for params in body["sampling_params"]:
        params["ignore_eos"] = True
    answer = _post(server, body, recipe.rollout.request_timeout_s)
    try:
        (sample,) = read_samples(
            answer, prompt, count=1, vocab_size=vocab_size, server=server.url, version=None
        )
    except BadAnswerError as error:
        raise ServerError(f"{server.name}: {error}; see its log {server.log}") from None
    return sample


def _post(server: Server, body: dict[str, Any], timeout_s: float) -> Any:
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise ServerError(
            f"{server.name} gave no answer ({error}); the last lines of its log {server.log}:\n"
            f"{server.log_tail()}"
        ) from None


def _read_calls(directory: Path) -> Calls:
    calls: Calls = defaultdict(list)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            calls[file.metadata()["module"]].append(tensors)
    return calls


def _check_tokens(calls: Calls, computed: tuple[int, ...], server: Server) -> None:
    embedded = [call["in0"] for call in calls.get("model.embed_tokens", [])]
    found = torch.cat(embedded).tolist() if embedded else []
    if found != list(computed):
        raise ServerError(
            f"{server.name} was asked for {len(computed)} tokens, but its modules recorded "
            f"{len(found)}{' others' if len(found) == len(computed) else ''}: nobody else may use "
            "it, and SGLang must run the model module by module (a model of its own with "
            f"model.embed_tokens; no speculative decoding). See its log {server.log}"
        )


def _values(operation: Operation, calls: Calls, tokens: int, predicted: int) -> torch.Tensor | None:
    """[tokens, channels] of one sequence; of the logits [predicted, V]."""
    if operation.name == LOGITS:
        # A pass over a prompt gives those of its last token only.
        rows = [call["out0"][-1:] for call in calls.get(LOGITS_MODULE, []) if "out0" in call]
        return torch.cat(rows)[-predicted:] if rows else None
    place = operation.server
    if place is None or place.module not in calls:
        return None
    key = f"{place.side}{place.index}"
    if any(key not in call for call in calls[place.module]):
        return None
    values = torch.cat([call[key] for call in calls[place.module]])
    return values.reshape(tokens, -1) if values.numel() % tokens == 0 else None
