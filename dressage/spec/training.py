"""How a job trains. Names are TRL's where TRL has one; defaults are the vetted ones."""

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from dressage.spec.artifact import ArtifactKind
from dressage.spec.base import Spec
from dressage.spec.suite import PLACES


class LoraSpec(Spec):
    """A low-rank adapter instead of full weights."""

    r: int = Field(default=16, ge=1, le=1024, description="Rank.")
    alpha: int = Field(default=32, ge=1, description="Scale; the update is alpha / r × B·A.")
    dropout: float = Field(default=0.05, ge=0, lt=1, description="In training only.")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        default="all-linear",
        description="Names of the layers that get an adapter, each of which must be there; or all "
        "linear ones, but the routers of experts. `[]` and null are all, too.",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _none_are_all(cls, given: Any) -> Any:
        return given or "all-linear"


class EchoSpec(Spec):
    """Also learn to predict what the environment answers (ECHO, arXiv 2605.24517).

    The loss becomes L_GRPO(actions) + coeff × cross-entropy(observations), from the same forward
    pass, at temperature 1.
    """

    coeff: float = Field(
        default=0.05, ge=0, le=10, description="0 is plain GRPO to the bit, with ECHO's curves."
    )
    normalization: Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"] = Field(
        default="selected_tokens",
        description="Mean over tokens; mean over rollouts of token means; or mean over rollouts of "
        "token sums divided by max_completion_length.",
    )
    include_scaffold: bool = Field(
        default=False, description="Also predict the chat template's markup around results."
    )
    tool_weights: dict[str, Annotated[float, Field(ge=0, le=100)]] = Field(
        default_factory=dict,
        description="Weight of a tool's results, by its name; 1 unless given, 0 leaves them out.",
    )
    ignore_lines: str | None = Field(
        default=None,
        max_length=1000,
        description="Regular expression; lines of results in which it is found (warnings, times) "
        "are not predicted.",
    )
    guardrail: bool = Field(
        default=True, description="Halve the coefficient when reward and action entropy collapse."
    )

    @field_validator("ignore_lines")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class VllmSpec(Spec):
    """vLLM writes the rollouts, in a process of its own on the job's card."""

    mode: Literal["colocate"] = Field(
        default="colocate", description="Beside the trainer, on the same card."
    )
    gpu_memory_utilization: float = Field(
        default=0.3, gt=0, lt=1, description="Share of the card's memory that vLLM may use."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and completion; the longest that there can be unless given.",
    )
    tensor_parallel_size: Literal[1] = Field(default=1, description="Cards of one engine.")
    sleep: bool = Field(
        default=False,
        description="Give vLLM's memory back while the model is trained; takes time in each step.",
    )


# Names of TRL and of scripts around it, and of ours where they differ.
OTHER_NAMES = {
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "per_device_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "torch_dtype": "dtype",
    "max_tool_calling_iterations": "max_tool_iterations",
    "max_new_tokens": "max_completion_length",
    "activation_checkpointing": "gradient_checkpointing",
    "lora_config": "lora",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "vllm_mode": "vllm.mode",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_max_model_length": "vllm.max_model_len",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_enable_sleep_mode": "vllm.sleep",
    "torch_compile": "compile",
    "world_model_coeff": "echo.coeff",
    "echo_coeff": "echo.coeff",
}


SWITCHES = {"use_lora": "lora", "use_vllm": "vllm"}


class TrainingSpec(Spec):
    """Group-relative policy optimization, as TRL's `GRPOTrainer` runs it.

    Names of TRL's are understood, too, and shown as adjustments.
    """

    _renamed: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def renamed(self) -> dict[str, str]:
        """Fields that were given under another name: ours, by that name."""
        return self._renamed

    epochs: float = Field(default=1, gt=0, le=1000, description="Passes over the training cases.")
    max_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Optimizer steps; overrides `epochs`."
    )
    batch_size: int = Field(
        default=2, ge=1, description="Rollouts of the longest kind in one forward pass, per GPU."
    )
    gradient_accumulation: int = Field(
        default=2, ge=1, description="Forward passes per optimizer step."
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, le=1, description="At its highest; small models bear more."
    )
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        default="linear",
        description="How it falls. A constant rate can ruin a policy late in a run.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps in which the learning rate rises."
    )
    adam_beta2: float = Field(
        default=0.999,
        gt=0,
        lt=1,
        description="Memory of AdamW's second moment; lower for short runs.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Longer gradients are shortened.")
    num_generations: int = Field(
        default=4, ge=2, le=1024, description="Rollouts per case and step: the group."
    )
    max_completion_length: int = Field(
        default=1024,
        ge=1,
        description="Tokens of a rollout after its prompt, results included.",
    )
    too_long_cases: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="Cases whose prompt leaves no room for an answer in the model's context: the "
        "job fails and names them before its first step, or goes on without them and says so.",
    )
    max_tool_iterations: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Times a rollout may return to the model.",
    )
    temperature: float = Field(default=0.8, gt=0, le=5, description="Of sampling rollouts.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Share of probability that is sampled from."
    )
    top_k: int = Field(default=0, ge=0, description="Most likely tokens sampled from; 0: all.")
    mask_truncated_completions: bool = Field(
        default=True, description="Rollouts cut at `max_completion_length` teach nothing."
    )
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = Field(
        default="dapo", description="How token losses are averaged; see TRL."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="What the spread of rewards is divided out over."
    )
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL term to the base model.")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Root of every draw: data order, adapter, sampling, environments.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description="Of the weights, and of mixed precision on a GPU. Without `lora` the weights "
        "themselves are trained in float32, and stored in this type.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Trade time for memory: compute activations twice."
    )
    load_in_4bit: bool = Field(
        default=False,
        description="QLoRA: the base in 4-bit NF4 with double quantization; implies `lora`.",
    )
    lora: LoraSpec | None = Field(default=None, description="Off (full weights) unless given.")
    echo: EchoSpec | None = Field(default=None, description="Off unless given.")
    vllm: VllmSpec | None = Field(
        default=None,
        description="Off unless given: the trainer's own model writes, which is four times slower "
        "on a GPU.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Versions of the weights by which a rollout may be behind those that it "
        "trains; above 0 more are in flight than a step needs, and nobody waits for the slowest. "
        "Needs `vllm`.",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one forward pass at most, padding included. Unless given, those of "
        "`batch_size` rollouts of the longest kind.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the model's layers for the update. Unless given: on a GPU with `lora` "
        "and `vllm`, without 4-bit weights or checkpointing.",
    )
    logging_steps: int = Field(default=5, ge=1, description="Optimizer steps per metrics event.")
    save_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps per checkpoint. Without it a lost worker means a new start.",
    )
    keep_checkpoints: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Of an attempt's checkpoints, so many of the newest become files of the job, "
        "also when it fails; exports can be made of them.",
    )
    keep_rollouts: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the training rollouts that are stored whole, chosen by chance; the "
        "first and the last of each group always are, of the others only the figures. Evaluations "
        "are always stored whole.",
    )
    resample_dead_groups: int = Field(
        default=0,
        ge=0,
        le=10,
        description="Times a group whose rewards are all equal is replaced by one of another case.",
    )
    pause_after_dead_steps: int | None = Field(
        default=20,
        ge=1,
        description="Steps in a row without any spread of rewards after which the job pauses.",
    )
    report_to: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(),
        description="Also report metrics there. TensorBoard's files become an artifact; wandb "
        "takes the worker's own `WANDB_…` settings.",
    )
    tool_timeout: float = Field(
        default=30, gt=0, le=3600, description="Seconds one tool or measure call may take."
    )
    max_tool_output: int = Field(
        default=16_384, ge=64, description="Characters of a tool result shown to the model."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _under_our_names(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        ours, renamed = _renamed_fields(data)
        found = handler(ours)
        found._renamed = renamed
        return found

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_none(cls, given: Any) -> Any:
        """`"none"` and a single name, as TRL takes them."""
        if given in ("none", None) or given == ["none"]:
            return ()
        return (given,) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _some_checkpoints(self) -> Self:
        if self.keep_checkpoints and not self.save_steps:
            raise ValueError("keep_checkpoints needs save_steps: without it there are none")
        return self

    @model_validator(mode="after")
    def _an_engine_that_is_ahead(self) -> Self:
        if self.max_staleness and not self.vllm:
            raise ValueError("max_staleness needs vllm: without it the model cannot write ahead")
        if self.max_staleness and self.vllm and self.vllm.sleep:
            raise ValueError(
                "vllm.sleep needs max_staleness 0: an engine that is ahead never rests"
            )
        if self.max_staleness and self.resample_dead_groups:
            raise ValueError(
                "resample_dead_groups needs max_staleness 0: other groups are begun anyway"
            )
        return self

    def compiles(self, *, gpus: int) -> bool:
        """Whether layers are compiled: as the job says; else where it is known to be faster.

        Generating with compiled layers would compile them for each length, so an engine of its own
        must sample.

        Args:
            gpus: Of the job.
        """
        if self.compile is not None:
            return self.compile
        plain = self.lora is not None and not self.load_in_4bit
        return gpus > 0 and plain and self.vllm is not None and not self.gradient_checkpointing

    @property
    def weights_dtype(self) -> str:
        """Of the weights while they are trained: whole ones are kept in float32.

        Adam's steps are smaller than bfloat16 can add to a weight: most would never move. An
        adapter's own weights are in float32 anyway.
        """
        return self.dtype if self.lora else "float32"

    @property
    def result_kind(self) -> ArtifactKind:
        """What training leaves behind."""
        return ArtifactKind.ADAPTER if self.lora else ArtifactKind.MODEL

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step, on one GPU."""
        return self.batch_size * self.gradient_accumulation

    @property
    def cases_per_step(self) -> int:
        """Cases of one optimizer step on one GPU: each has a whole group."""
        return self.rollouts_per_step // self.num_generations


def _renamed_fields(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same fields under our names, and which ones were not.

    Raises:
        ValueError: A field is there under both names.
    """
    others = (*OTHER_NAMES, *SWITCHES)
    ours = {name: value for name, value in data.items() if name not in others}
    renamed = {}
    for name, own in OTHER_NAMES.items():
        if name not in data:
            continue
        part, _, inner = own.partition(".")
        place, field = (ours, part) if not inner else (ours.get(part), inner)
        if inner:
            if not isinstance(place, dict | None):
                raise ValueError(f"{name} is {own} here, but {part} is no object")
            place = ours[part] = dict(place or {})  # not the sender's own
        assert isinstance(place, dict)
        if field in place:
            raise ValueError(f"{name} and {own} are one field: give one of them")
        place[field] = data[name]
        renamed[name] = own
    for name, own in SWITCHES.items():
        if name not in data:
            continue
        renamed[name] = own
        wanted = data[name]
        if not isinstance(wanted, bool) or (not wanted and ours.get(own) is not None):
            raise ValueError(f"{name} is true or false, and false only without {own}")
        ours.setdefault(own, {} if wanted else None)
    return ours, renamed


class EvaluationSpec(Spec):
    """Proof of benefit on cases that are never trained on."""

    holdout: float = Field(
        default=0.2,
        ge=0,
        le=0.9,
        description="Share of the suite kept for evaluation; 0: none. Which cases hangs on their "
        "content, so the share is met on average, and a new version keeps its old ones apart.",
    )
    every_steps: int | None = Field(
        default=None,
        ge=1,
        description="Also evaluate during training, every n optimizer steps, and keep the best "
        "weights. Half of the held-out cases are for choosing then, the other half for the proof.",
    )
    only: bool = Field(
        default=False,
        description='Measure the model on held-out cases, and end: what `"training": null` asks.',
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after so many evaluations in a row without a better one.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=5, description="0 = greedy; the training temperature unless given."
    )

    def boundary(self, places: Collection[int]) -> int:
        """The place (`Case.place`) below which cases are held out.

        It depends on the share alone, but for small suites: both sides have a case, if there are
        two different ones.

        Args:
            places: Of all cases of a suite.
        """
        if self.holdout == 0 or len(set(places)) < 2:
            return 0
        wanted = round(self.holdout * PLACES)
        return min(max(wanted, min(places) + 1), max(places))

    @model_validator(mode="after")
    def _something_to_choose_by(self) -> Self:
        if self.patience and not self.every_steps:
            raise ValueError("patience needs every_steps: without it nothing is compared")
        if self.every_steps and self.holdout == 0:
            raise ValueError("every_steps needs held-out cases: holdout is 0")
        if self.only and self.holdout == 0:
            raise ValueError("only measuring needs held-out cases: holdout is 0")
        if self.only and self.every_steps:
            raise ValueError("every_steps needs training, and only leaves it out")
        return self
