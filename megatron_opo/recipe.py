"""The typed recipe: what can be asked for, with its defaults and its bounds.

`recipe_file` reads one. Checks that need the model's config.json are in `model_fit`; both run on a
laptop, before any GPU is touched.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from megatron_opo.redaction import hide_secrets

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

LossAggregation = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

Estimator = Literal[
    "opo",
    "opo_leave_one_out",
    "opo_batch",
    "opo_whitened",
    "opo_energy",
    "otb",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "grpo",
    "dr_grpo",
    "remax",
]
ESTIMATOR_ALIASES = {
    "rloo_length_weighted": "opo_leave_one_out",
    "reinforce_plus_plus_baseline_length_weighted": "opo_whitened",
    "optimal_token_baseline": "otb",
}
REFUSED_ESTIMATORS = {
    "gae": "it needs a critic, and there is none: a baseline comes from the group's own rewards"
}

LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(Section):
    """The model that is trained."""

    path: str = Field(description="Hugging Face model directory (config, weights, tokenizer)")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="of weights and activations, in the trainer and in the servers",
    )
    megatron_checkpoint: str | None = Field(
        default=None,
        description="start from the weights of this Megatron checkpoint (or run) instead of path's",
    )


class ProceduralConfig(Section):
    """Questions that a task of reasoning-gym makes."""

    task: str = Field(description="reasoning-gym task name, e.g. chain_sum")
    size: PositiveInt = Field(default=10_000, description="questions that are made")
    seed: Seed = Field(
        default=0, description="of the questions; train and eval need different ones"
    )
    config: dict[str, Any] = Field(default={}, description="the task's own options")


class DatasetConfig(Section):
    """Where prompts and answers come from: exactly one of `files` and `procedural`."""

    files: tuple[str, ...] = Field(default=(), description="parquet or jsonl files")
    procedural: ProceduralConfig | None = Field(
        default=None, description="questions made by reasoning-gym, instead of files"
    )
    prompt_key: str = Field(
        default="prompt", description="column with the prompt: text, or a list of chat messages"
    )
    answer_key: str = Field(
        default="answer",
        description="column with the right answer; while this is the default, verl's "
        "reward_model.ground_truth comes first",
    )
    limit: PositiveInt | None = Field(default=None, description="use only the first rows")

    @model_validator(mode="after")
    def _one_source(self):
        if bool(self.files) == (self.procedural is not None):
            raise ValueError(
                f"give exactly one source: `files` (got {list(self.files)}) or `procedural` "
                f"(got {self.procedural.task if self.procedural else None})"
            )
        return self


class DataConfig(Section):
    """Prompts, and how they become text."""

    train: DatasetConfig = Field(description="the prompts to train on")
    eval: DatasetConfig | None = Field(
        default=None, description="the prompts to evaluate on; null: no evaluation"
    )
    system_prompt: str | None = Field(
        default=None, description="put before every prompt as a system message"
    )
    apply_chat_template: bool = Field(
        default=True,
        description="false: prompts are plain text, the contents of their messages with an empty "
        "line between",
    )
    max_prompt_tokens: PositiveInt = Field(
        default=1024, description="longest prompt, in tokens of the whole text after the template"
    )
    overlong_prompts: Literal["filter", "error"] = Field(
        default="filter",
        description="what becomes of prompts above max_prompt_tokens: left out, or the run ends",
    )
    hold_out_eval: bool = Field(
        default=True, description="leave out training prompts that the evaluation asks too"
    )
    shuffle: bool = Field(
        default=True,
        description="every epoch in an order of its own, made of `seed`; false: always in the "
        "order of the files",
    )


class RewardConfig(Section):
    """What scores a response, in worker processes."""

    function: str = Field(
        default="math",
        description="exact | numeric | math | reasoning_gym | path/to/file.py:function",
    )
    kwargs: dict[str, Any] = Field(default={}, description="extra keyword arguments to it")
    workers: PositiveInt = Field(default=2, description="processes that score samples")
    timeout_s: PositiveFloat = Field(default=10.0, description="limit for one sample")
    memory_gb: PositiveFloat = Field(default=4.0, description="limit for each worker")


class DynamicSamplingConfig(Section):
    """What becomes of groups without a signal."""

    enabled: bool = Field(
        default=False, description="replace groups whose rewards are all equal by other prompts'"
    )
    max_rounds: PositiveInt = Field(
        default=8, description="rounds of sampling a step at most; then it takes what it has"
    )


_KEY = "a key is made for each run; set MEGATRON_OPO_API_KEY to choose it"
# SGLang's options that say where a server is and who may use it.
OWN_SERVER_OPTIONS = {
    "host": "use rollout.host",
    "port": "use rollout.port",
    "tp": "use rollout.tensor_parallel",
    "tp_size": "use rollout.tensor_parallel",
    "tensor_parallel_size": "use rollout.tensor_parallel",
    "model": "use model.path",
    "model_path": "use model.path",
    "api_key": _KEY,
    "admin_api_key": _KEY,
    "config": "write the options themselves here",
}


class RolloutConfig(Section):
    """Sampling, and the servers that do it."""

    prompts_per_step: PositiveInt = Field(
        default=64, description="prompts whose groups of samples one update is made of"
    )
    samples_per_prompt: Annotated[int, Field(ge=2)] = Field(
        default=8, description="group size; a baseline needs at least two samples"
    )
    max_response_tokens: PositiveInt = Field(
        default=1024,
        description="a response is cut here; algorithm.truncated says what it then counts for",
    )
    temperature: PositiveFloat = Field(
        default=1.0, description="of sampling, and of the trainer's logprobs"
    )
    top_p: float = Field(
        default=1.0, description="only 1: a truncated sampler is not the policy that is trained"
    )
    top_k: int = Field(default=-1, description="only -1, for the same reason")
    min_p: float = Field(default=0.0, description="only 0, for the same reason")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="tokens that end a response, beside the model's own"
    )
    function: str | None = Field(
        default=None,
        description="path/to/file.py:function, for responses of several turns; null: the policy "
        "speaks once",
    )
    function_timeout_s: PositiveFloat = Field(
        default=1800.0, description="limit for one response of rollout.function"
    )
    dynamic_sampling: DynamicSamplingConfig = Field(
        default=DynamicSamplingConfig(),
        description="replace groups that have no gradient by other prompts'",
    )
    extra_prompts: NonNegativeInt = Field(
        default=0,
        description="sample so many more than a step trains, and give those up that are not there "
        "when it has enough: these come first in the next steps. Favours short responses, and "
        "makes a run depend on timing",
    )
    urls: tuple[str, ...] = Field(
        default=(), description="servers that already run; empty: launch `servers` of them"
    )
    servers: PositiveInt = Field(default=1, description="how many are launched")
    tensor_parallel: PositiveInt = Field(default=1, description="of each launched server")
    nodes: NonNegativeInt = Field(
        default=0,
        description="the job's last so many nodes only generate; 0: servers are where trainers are",
    )
    host: str = Field(
        default="127.0.0.1",
        description="what launched servers listen on; in a job of several nodes: each node's "
        "address towards the others (that of GLOO_SOCKET_IFNAME where set)",
    )
    port: Port = Field(default=0, description="first server's port; 0: a free one")
    server_args: dict[str, Any] = Field(
        default={}, description="SGLang's own launch options, by their names (max_total_tokens)"
    )
    server_env: dict[str, str] = Field(default={}, description="environment of the servers")
    hand_over_memory: bool | None = Field(
        default=None,
        description="servers and trainer each give their memory back while the other works; null: "
        "where they share GPUs",
    )
    deterministic: bool | None = Field(
        default=None,
        description="the same seed gives the same tokens and logprobs to the bit, whatever else a "
        "server does; null: on CPUs, as on GPUs it makes SGLang slower",
    )
    max_concurrent_requests: PositiveInt = Field(default=256, description="samples in flight")
    request_timeout_s: PositiveFloat = Field(
        default=600.0, description="for a server's answer to a prompt; then it is asked elsewhere"
    )
    retries: NonNegativeInt = Field(
        default=3,
        description="of a prompt that gets no usable answer; a lost server does not count",
    )
    start_timeout_s: PositiveFloat = Field(
        default=300.0, description="for a server to answer after its start"
    )
    health_every_s: PositiveFloat = Field(
        default=5.0, description="seconds between two looks at a server's health while it samples"
    )
    health_timeout_s: PositiveFloat | None = Field(
        default=None,
        description="a server that is not healthy for so long is lost; if the run launched it, it "
        "is ended and started again; null: 30 on GPUs, 120 on CPUs, where a batch may take long",
    )
    max_restarts: NonNegativeInt = Field(
        default=5,
        description="new starts of each launched server, counted from the start of the run or of "
        "the job's requeue, not from the last step; the run ends when no server is left",
    )

    def shares_gpus(self, device: str) -> bool:
        """Whether the servers are on the GPUs that the trainer trains on. `device` is the
        trainer's, "cpu" or "cuda"."""
        return device == "cuda" and not self.nodes and not self.urls

    def health_limit_s(self, device: str) -> float:
        """`health_timeout_s`, decided."""
        if self.health_timeout_s is None:
            return 30.0 if device == "cuda" else 120.0
        return self.health_timeout_s

    def hands_over(self, device: str) -> bool:
        """`hand_over_memory`, decided."""
        if self.hand_over_memory is None:
            return self.shares_gpus(device)
        return self.hand_over_memory

    def is_deterministic(self, device: str) -> bool:
        """`deterministic`, decided."""
        return device == "cpu" if self.deterministic is None else self.deterministic

    @model_validator(mode="after")
    def _addresses_and_counts(self):
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`urls`: {url!r} must begin with http:// (http://host:30000)")
        if self.extra_prompts > self.prompts_per_step:
            raise ValueError(
                f"`extra_prompts` is {self.extra_prompts}, but a step trains only "
                f"{self.prompts_per_step} (prompts_per_step): give so many at most; an eighth of "
                "them is a good start"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"`urls` names a server twice: {list(self.urls)}")
        if self.port and self.port + self.servers - 1 > 65_535:
            raise ValueError(
                f"`port` {self.port} leaves no ports up to 65535 for {self.servers} servers"
            )
        return self

    @field_validator("server_args")
    @classmethod
    def _own_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if instead := OWN_SERVER_OPTIONS.get(name.replace("-", "_")):
                raise ValueError(f"`{name}` is not for `server_args`: {instead}")
        return options

    @model_validator(mode="after")
    def _untruncated(self):
        for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, key) != neutral:
                raise ValueError(
                    f"`{key}` is {getattr(self, key)}, must be {neutral}: a truncated sampler "
                    "draws from another distribution than the one that is trained, so the update "
                    "would not be on-policy (truncate in `eval` if you like)"
                )
        return self


class SyncConfig(Section):
    """How new weights come to the servers after each step."""

    transport: Literal["auto", "distributed", "shared_memory", "disk"] = Field(
        default="auto",
        description="shared_memory: servers are on the trainers' nodes; auto: that where they "
        "share GPUs, else distributed",
    )
    bucket_mb: PositiveInt = Field(default=512, description="weights sent per message")
    verify: bool = Field(default=True, description="compare checksums after each sync")
    timeout_s: PositiveFloat = Field(
        default=120.0,
        description="for a server's answer to one message; one that is silent is left out",
    )


class CorrectionConfig(Section):
    """Importance weights for tokens to which trainer and servers give different probabilities;
    docs/on_policy.md has the formulas."""

    kind: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="weigh by the ratio trainer / server: truncate: at most upper (TIS); mask: 0 "
        "where it is not from lower to upper (IcePop, MIS)",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="whose ratio: the token's, the product over its response, or the geometric "
        "mean over it",
    )
    upper: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=2.0, description="the highest ratio"
    )
    lower: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="mask: the lowest ratio; null: 1 / upper"
    )

    @property
    def lowest(self) -> float:
        """`lower`, decided."""
        return 1 / self.upper if self.lower is None else self.lower

    @model_validator(mode="after")
    def _has_effect(self):
        needs = {"level": ("truncate", "mask"), "upper": ("truncate", "mask"), "lower": ("mask",)}
        for name, kinds in needs.items():
            given = getattr(self, name)
            if self.kind not in kinds and given != type(self).model_fields[name].default:
                raise ValueError(
                    f"`{name}` is {given} but `kind` is {self.kind}, which does not use it: set "
                    f"kind to {' or '.join(kinds)}, or drop `{name}`"
                )
        return self


class AlgorithmConfig(Section):
    """From rewards to the loss, and what must hold for it."""

    estimator: Estimator = Field(default="opo", description="docs/estimators.md has them all")
    singleton: Literal["zero", "raw"] = Field(
        default="zero",
        description="advantage of what has nothing to be compared with: 0, or its reward",
    )
    truncated: Literal["keep", "mask", "penalise"] = Field(
        default="keep", description="responses cut at rollout.max_response_tokens"
    )
    overlong_buffer: PositiveInt | None = Field(
        default=None, description="penalise: the last so many tokens cost more and more"
    )
    overlong_factor: PositiveFloat = Field(
        default=1.0, description="penalise: taken from the reward of a response cut at the limit"
    )
    loss_aggregation: LossAggregation = Field(
        default="token-mean",
        description="how much each token counts: the mean over all tokens, or a mean over "
        "responses of the sum, the mean, or the sum over max_response_tokens",
    )
    max_logprob_gap: PositiveFloat | None = Field(
        default=None,
        description="stop when |logp_trainer - logp_server| of any token exceeds this (nats); "
        "null: 0.5, and no bound with a correction",
    )
    mean_logprob_gap: PositiveFloat | None = Field(
        default=None,
        description="stop when the mean over a step's tokens exceeds this (nats); null: 0.03, and "
        "0.1 with a correction",
    )
    correction: CorrectionConfig = Field(
        default=CorrectionConfig(),
        description="importance weights where the two cannot agree",
    )

    @property
    def gap_bounds(self) -> tuple[float, float]:
        """`max_logprob_gap` and `mean_logprob_gap`, decided. A correction bounds what any single
        token can do; a mean gap says that something is wrong, and stops the run, with it, too."""
        largest, mean = (0.5, 0.03) if self.correction.kind == "none" else (math.inf, 0.1)
        return self.max_logprob_gap or largest, self.mean_logprob_gap or mean

    @field_validator("estimator", mode="before")
    @classmethod
    def _known_estimator(cls, name: Any) -> Any:
        if not isinstance(name, str):
            return name
        if name in REFUSED_ESTIMATORS:
            allowed = ", ".join(get_args(Estimator))
            raise ValueError(f"{REFUSED_ESTIMATORS[name]}; allowed: {allowed}")
        return ESTIMATOR_ALIASES.get(name, name)

    @model_validator(mode="after")
    def _overlong(self):
        if (self.truncated == "penalise") != (self.overlong_buffer is not None):
            raise ValueError(
                f"`truncated` is {self.truncated} and `overlong_buffer` is {self.overlong_buffer}: "
                "truncated=penalise needs overlong_buffer, the number of tokens before "
                "rollout.max_response_tokens over which the penalty grows; nothing else uses it"
            )
        return self


class ActorConfig(Section):
    """The trainer: its layout, and what it keeps in memory."""

    tensor_parallel: PositiveInt = Field(
        default=1, description="ranks that share every layer's matrices out among them"
    )
    context_parallel: PositiveInt = Field(
        default=1, description="ranks that share the tokens of each sequence out among them"
    )
    pipeline_parallel: PositiveInt = Field(
        default=1, description="stages of consecutive layers, each on ranks of its own"
    )
    virtual_pipeline: PositiveInt = Field(
        default=1,
        description="chunks of layers on each pipeline stage; more leave it less idle",
    )
    expert_parallel: PositiveInt = Field(
        default=1, description="ranks that share the experts of a layer out among them"
    )
    expert_tensor_parallel: PositiveInt | None = Field(
        default=None,
        description="ranks that share each expert; null: tensor_parallel (1 suits small experts)",
    )
    data_parallel: PositiveInt | None = Field(
        default=None, description="null: what the number of processes leaves over"
    )
    sequence_parallel: bool = Field(
        default=False,
        description="tensor-parallel ranks share the tokens out between their matrices, which "
        "saves memory",
    )
    micro_batch_tokens: PositiveInt = Field(
        default=16_384,
        description="tokens in one packed micro-batch, on each of its context_parallel ranks",
    )
    logprob_chunk_tokens: PositiveInt = Field(
        default=1024, description="tokens whose logits exist at once"
    )
    recompute: Literal["none", "full"] = Field(
        default="none",
        description="full: the backward pass computes each layer again, instead of keeping what "
        "is inside it",
    )
    grad_bucket_mb: PositiveFloat | None = Field(
        default=None,
        description="gradients (float32) are summed over data-parallel ranks in buckets of this "
        "size while the backward pass goes on; null: all of them at its end",
    )
    transformer_config: dict[str, Any] = Field(
        default={}, description="Megatron-Core TransformerConfig fields, by their names"
    )

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def replica_size(self) -> int:
        """Processes that compute a sequence together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def stage_shape(self) -> str:
        """For messages: the product of those of them that are in one pipeline stage."""
        context = self.context_parallel
        shared = f" x actor.context_parallel {context}" if context > 1 else ""
        return f"actor.tensor_parallel {self.tensor_parallel}{shared}"

    @property
    def replica_shape(self) -> str:
        """For messages: the product of all of them."""
        return f"{self.stage_shape} x actor.pipeline_parallel {self.pipeline_parallel}"

    @property
    def smallest_world(self) -> int:
        """The fewest processes that hold the model: all others are multiples of it."""
        of_stage = math.lcm(
            self.tensor_parallel * self.context_parallel,
            self.expert_tensor_size * self.expert_parallel,
        )
        return of_stage * self.pipeline_parallel

    def expert_problems(self, count: int, channels: int) -> list[str]:
        """Why this layout cannot hold a model whose layers have `count` experts (0: none) of
        `channels` channels each."""
        if count == 0:
            fields = {"expert_parallel": self.expert_parallel}
            fields["expert_tensor_parallel"] = self.expert_tensor_parallel or 1
            return [
                f"actor.{name}: {size}, but the model has no experts; drop it"
                for name, size in fields.items()
                if size > 1
            ]
        problems = []
        if count % self.expert_parallel:
            allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            problems.append(
                f"actor.expert_parallel: {self.expert_parallel} does not divide the model's "
                f"{count} experts; allowed: {allowed}"
            )
        if channels % self.expert_tensor_size:
            problems.append(
                f"actor.expert_tensor_parallel: {self.expert_tensor_size} (null: tensor_parallel) "
                f"does not divide the {channels} channels of an expert (moe_intermediate_size)"
            )
        if self.tensor_parallel > 1 and not self.sequence_parallel:
            problems.append(
                "actor.sequence_parallel: false, but a model with experts needs it with "
                f"actor.tensor_parallel {self.tensor_parallel}, or each token would be sent to "
                "its experts once per tensor-parallel rank; set it to true"
            )
        return problems


class OptimizerConfig(Section):
    """Adam, and its learning rate."""

    lr: NonNegativeFloat = Field(
        default=1e-6, description="learning rate of Adam after the warm-up"
    )
    min_lr: NonNegativeFloat = Field(
        default=0.0, description="the rate at the last update, where `schedule` decays"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the rate between the warm-up and the last update"
    )
    warmup_steps: NonNegativeInt = Field(
        default=0, description="updates over which the rate rises to lr, linearly"
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="Adam's, of the first and the second moment"
    )
    eps: PositiveFloat = Field(
        default=1e-8, description="Adam's, added to the root of the second moment"
    )
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled, as in AdamW")
    clip_grad: PositiveFloat = Field(
        default=1.0, description="a gradient of a larger norm is scaled down to this one"
    )
    distributed: bool = Field(default=True, description="shard optimizer state over data ranks")

    @model_validator(mode="after")
    def _rates(self):
        if self.min_lr > self.lr:
            raise ValueError(f"`min_lr` ({self.min_lr}) is above `lr` ({self.lr})")
        return self


class TrainConfig(Section):
    """The length of the run, and checks while it goes on."""

    steps: PositiveInt = Field(
        default=100, description="updates of the whole run, those before a resume included"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="when logprobs, loss or gradient are not finite; skip: go on with the next "
        "prompts, up to 3 times in a row",
    )
    check_ranks_every: NonNegativeInt = Field(
        default=100,
        description="steps between checks that ranks hold the same parameters where they should, "
        "and one at start; 0: never",
    )


class EvalConfig(Section):
    """Evaluation on data.eval; without that there is none."""

    every: NonNegativeInt = Field(default=10, description="steps between evaluations; 0: never")
    at_start: bool = Field(default=True, description="evaluate the start weights")
    at_end: bool = Field(default=True, description="evaluate after the last step")
    samples_per_prompt: PositiveInt = Field(default=1, description="k of avg@k and pass@k")
    temperature: NonNegativeFloat = Field(
        default=1.0, description="of the evaluation's samples; 0: greedy"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="of the evaluation's samples"
    )

    @property
    def runs(self) -> bool:
        return bool(self.every or self.at_start or self.at_end)


class CheckpointConfig(Section):
    """What is kept, to resume from and to use."""

    every: NonNegativeInt = Field(default=0, description="steps between checkpoints; 0: at end")
    keep: PositiveInt = Field(default=2, description="newest checkpoints that are kept")
    keep_every: NonNegativeInt = Field(
        default=0, description="those of steps that this divides are kept, too; 0: none"
    )
    keep_best: bool = Field(
        default=False,
        description="that of the step with the best evaluation is kept, too, if there was one",
    )
    export_hf: bool = Field(default=True, description="write a Hugging Face model at the end")
    export_hf_every: NonNegativeInt = Field(
        default=0, description="steps between Hugging Face models, hf/step_N; 0: none"
    )
    keep_hf: PositiveInt | None = Field(
        default=None, description="newest of them that are kept; null: all"
    )


class LogConfig(Section):
    """What is logged beside metrics.jsonl."""

    loggers: tuple[LoggerName, ...] = Field(
        default=("tensorboard",),
        description="where metrics go, too: tensorboard, wandb, mlflow, trackio. In the run "
        "directory, unless the environment names a server (docs/logging.md)",
    )
    project: Annotated[str, Field(min_length=1)] = Field(
        default="megatron_opo",
        description="of wandb and trackio, and experiment of mlflow; the run in it has the "
        "recipe's `name`",
    )
    prometheus_port: Port | None = Field(
        default=None,
        description="the trainer shows its newest metrics to Prometheus here (0: a free port), "
        "and launched servers theirs on their own ports; null: no",
    )
    prometheus_host: str = Field(
        default="127.0.0.1",
        description="what that port listens on; 0.0.0.0: every address of rank 0's machine",
    )
    samples_per_step: NonNegativeInt = Field(
        default=16, description="responses of each step kept in samples/"
    )
    policy_shift: bool = Field(
        default=False,
        description="log on_policy/kl_step and on_policy/kl_to_start, how far each update moves "
        "the policy and how far it is from the start: two more forward passes a step, and a copy "
        "of the weights in the host's memory",
    )
    batches_every: NonNegativeInt = Field(
        default=0,
        description="steps between batches kept whole in batches/, for --replay; 0: only those of "
        "updates that failed",
    )

    @field_validator("loggers", mode="before")
    @classmethod
    def _none_or_one(cls, loggers: Any) -> Any:
        if isinstance(loggers, str):
            return (loggers,)
        return () if loggers is None else loggers

    @field_validator("loggers")
    @classmethod
    def _each_once(cls, loggers: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(loggers)) < len(loggers):
            raise ValueError(f"names one twice: {list(loggers)}")
        return loggers


class ProfileConfig(Section):
    """What is found out about single steps, in profile/ of the run."""

    steps: tuple[PositiveInt, ...] = Field(
        default=(),
        description="steps to trace on all ranks and servers: 3, 3-4 or [3, 7]; null: none",
    )
    torch: bool = Field(
        default=False, description="also torch's profiler, which makes the step slower"
    )
    memory: bool = Field(default=False, description="also torch's snapshots of GPU memory")
    servers: bool = Field(
        default=False, description="also SGLang's profiler, on servers that the run launched"
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _range(cls, steps: Any) -> Any:
        if steps is None:
            return ()
        if isinstance(steps, int):
            return (steps,)
        if not isinstance(steps, str):
            return steps
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps.strip())
        if found and int(found[1]) <= int(found[2] or found[1]):
            return tuple(range(int(found[1]), int(found[2] or found[1]) + 1))
        raise ValueError("not a step or a range of steps: write 3, 3-4 (first-last) or [3, 7]")

    @model_validator(mode="after")
    def _has_steps(self):
        extras = [name for name in ("torch", "memory", "servers") if getattr(self, name)]
        if extras and not self.steps:
            raise ValueError(
                f"`{extras[0]}` is true but `steps` names no step to profile: add "
                "profile.steps=3-4, or drop it"
            )
        return self


class Recipe(Section):
    """A whole run. `megatron-opo train RECIPE --print` shows every field with its default."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="of the run: letters, digits and . _ -"
    )
    seed: Seed = Field(
        default=0,
        description="of prompt order, random generators and, where rollout.deterministic, samples",
    )
    run_dir: str = Field(
        default="runs/{name}", description="where the run writes; {name} is replaced"
    )
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sync: SyncConfig = SyncConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir.format(name=self.name))

    @property
    def rollout_to_launch(self) -> RolloutConfig:
        """`rollout`, with the servers' metrics on where `log.prometheus_port` asks for them."""
        if self.log.prometheus_port is None:
            return self.rollout
        options = {"enable_metrics": True} | self.rollout.server_args
        return self.rollout.model_copy(update={"server_args": options})

    def to_show(self) -> dict[str, Any]:
        """All fields as JSON-like data, secrets hidden: for files and logs."""
        return hide_secrets(self.model_dump(mode="json"))

    def transport(self, device: str) -> str:
        """`sync.transport`, decided. `device` is the trainer's, "cpu" or "cuda"."""
        if self.sync.transport != "auto":
            return self.sync.transport
        return "shared_memory" if self.rollout.shares_gpus(device) else "distributed"

    @model_validator(mode="after")
    def _cross_checks(self):
        actor, rollout = self.actor, self.rollout
        problems = []
        if actor.sequence_parallel and actor.tensor_parallel == 1:
            problems.append(
                "actor.sequence_parallel is true but actor.tensor_parallel is 1: raise "
                "tensor_parallel or turn sequence_parallel off"
            )
        if actor.virtual_pipeline > 1 and actor.pipeline_parallel == 1:
            problems.append(
                f"actor.virtual_pipeline is {actor.virtual_pipeline} but actor.pipeline_parallel "
                "is 1: there are no stages whose layers could be cut into chunks; raise "
                "pipeline_parallel or set virtual_pipeline to 1"
            )
        world = actor.replica_size * (actor.data_parallel or 0)
        if world % actor.smallest_world:
            problems.append(
                f"{actor.stage_shape} x actor.data_parallel {actor.data_parallel} = "
                f"{world // actor.pipeline_parallel} processes per pipeline stage, which is not a "
                "multiple of actor.expert_parallel "
                f"{actor.expert_parallel} x actor.expert_tensor_parallel "
                f"{actor.expert_tensor_size}: change data_parallel, or set it to null"
            )
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        if actor.data_parallel and samples < actor.data_parallel:
            problems.append(
                f"actor.data_parallel is {actor.data_parallel} but a step has only {samples} "
                f"samples (rollout.prompts_per_step {rollout.prompts_per_step} x "
                f"rollout.samples_per_prompt {rollout.samples_per_prompt}): each data-parallel "
                "rank needs at least one"
            )
        if self.data.eval is None and self.eval != EvalConfig() and self.eval.runs:
            problems.append(
                "eval is configured but data.eval names no dataset: add data.eval, or set "
                "eval.every=0, eval.at_start=false and eval.at_end=false"
            )
        if self.optimizer.schedule != "constant" and self.optimizer.warmup_steps > self.train.steps:
            problems.append(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) exceeds train.steps "
                f"({self.train.steps}): the learning rate would never decay"
            )
        if late := [step for step in self.profile.steps if step > self.train.steps]:
            problems.append(
                f"profile.steps has step {late[0]} but train.steps is {self.train.steps}: name "
                "steps that are trained"
            )
        buffer = self.algorithm.overlong_buffer
        if buffer is not None and buffer > rollout.max_response_tokens:
            problems.append(
                f"algorithm.overlong_buffer ({buffer}) exceeds rollout.max_response_tokens "
                f"({rollout.max_response_tokens}): every response would be penalised; lower it"
            )
        if rollout.nodes and rollout.hand_over_memory:
            problems.append(
                f"rollout.hand_over_memory is true but rollout.nodes is {rollout.nodes}: those "
                "nodes only generate, so there is nobody to hand memory to; set it to null"
            )
        if rollout.urls and rollout.hand_over_memory:
            problems.append(
                "rollout.hand_over_memory is true but rollout.urls is given: such servers outlive "
                "the run, which would leave them without their weights; set it to null"
            )
        if rollout.nodes and self.sync.transport == "shared_memory":
            problems.append(
                f"sync.transport is shared_memory but rollout.nodes is {rollout.nodes}: servers on "
                "nodes of their own share no memory with the trainer; set it to auto"
            )
        if set("{}") & set(self.run_dir.replace("{name}", "")):
            problems.append(f"run_dir is {self.run_dir!r}: only {{name}} may stand in braces")
        if problems:
            raise ValueError("; ".join(problems))
        return self
