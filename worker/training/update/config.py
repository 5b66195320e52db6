"""A job's training specification in the words of TRL and PEFT."""

import importlib.util
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch.nn import Linear
from trl import GRPOConfig

from dressage.spec.status import Reason
from dressage.spec.training import TrainingSpec
from worker.training.process.failures import RunFailure
from worker.training.update import ranks

log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ROUTERS = re.compile(r".*\.(router|gate|shared_expert_gate)")


def require_reporters(spec: TrainingSpec) -> None:
    """Check that the packages that metrics are reported with are there.

    Raises:
        RunFailure: One is not.
    """
    for name in spec.report_to:
        if importlib.util.find_spec(name) is None:
            raise RunFailure(
                Reason.MISSING_DEPENDENCY,
                f"training.report_to: the worker lacks the package {name}",
            )


@dataclass(frozen=True)
class UpdatePlan:
    """What the machine lets the update do.

    Attributes:
        use_cpu: Whether there is no GPU.
        masters: Whether an adapter lies in bfloat16 beside its base, and the optimizer keeps it in
            float32: nothing is cast in a pass then.
        compiled: Whether the layers are compiled.
    """

    use_cpu: bool
    masters: bool = False
    compiled: bool = False


def update_plan(spec: TrainingSpec, *, gpus: int) -> UpdatePlan:
    """How a job's update runs on the GPUs it has."""
    plain = gpus > 0 and spec.lora is not None and not spec.load_in_4bit
    return UpdatePlan(
        use_cpu=gpus == 0,
        masters=plain and spec.dtype == "bfloat16",
        compiled=spec.compiles(gpus=gpus),
    )


def grpo_config(spec: TrainingSpec, output: Path, plan: UpdatePlan) -> GRPOConfig:
    """Our specification in TRL's words."""
    return GRPOConfig(
        output_dir=str(output),
        num_train_epochs=spec.epochs,
        max_steps=spec.max_steps or -1,
        # Micro-batches are made within a step, of rollouts of like length.
        per_device_train_batch_size=spec.rollouts_per_step,
        gradient_accumulation_steps=1,
        learning_rate=spec.learning_rate,
        lr_scheduler_type=spec.lr_scheduler,
        warmup_steps=spec.warmup_steps,
        adam_beta2=spec.adam_beta2,
        max_grad_norm=spec.max_grad_norm,
        num_generations=spec.num_generations,
        max_completion_length=spec.max_completion_length,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        loss_type=spec.loss_type,
        scale_rewards=spec.scale_rewards,
        beta=spec.beta,
        mask_truncated_completions=spec.mask_truncated_completions,
        logging_steps=spec.logging_steps,
        save_strategy="steps" if spec.save_steps else "no",
        save_steps=spec.save_steps or 500,
        save_total_limit=2,
        seed=spec.seed,
        use_cpu=plan.use_cpu,
        ddp_timeout=ranks.PATIENCE_SECONDS,
        ddp_find_unused_parameters=False,
        bf16=spec.dtype == "bfloat16" and not plan.use_cpu and not plan.masters,
        fp16=spec.dtype == "float16" and not plan.use_cpu,
        activation_checkpointing=spec.gradient_checkpointing,
        report_to=list(spec.report_to) or "none",
        disable_tqdm=True,
    )


def require_targets(spec: TrainingSpec, model: Any) -> None:
    """Check that every layer that shall get an adapter is there and can have one.

    Raises:
        RunFailure: One is not, or is shared with the embeddings.
    """
    if spec.lora is None or isinstance(spec.lora.target_modules, str):
        return
    modules = [name for name, _ in model.named_modules()] + _fused(model)
    missing = [
        target
        for target in spec.lora.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in modules)
    ]
    if missing:
        linear = [*_linear(model), *_fused(model)]
        raise RunFailure(
            Reason.MODEL_UNSUPPORTED,
            f"training.lora.target_modules: the model has no layer {', '.join(missing)}; its "
            f"linear layers are {', '.join(sorted({*linear}))}",
        )
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and "lm_head" in spec.lora.target_modules:
        raise RunFailure(
            Reason.MODEL_UNSUPPORTED,
            "training.lora.target_modules: lm_head is one with the embeddings in this model, and "
            "cannot have an adapter of its own; leave it out",
        )


def _linear(model: Any) -> list[str]:
    """Names of linear layers, without where they are; the output layer and routers are none."""
    output = model.get_output_embeddings()
    return [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not output and not ROUTERS.fullmatch(name)
    ]


def _fused(model: Any) -> list[str]:
    """Layers of experts that lie in one tensor with others; PEFT knows them by their own names."""
    fused = any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    return ["gate_proj", "up_proj", "down_proj"] if fused else []


def lora_config(spec: TrainingSpec, model: Any) -> LoraConfig | None:
    """The adapter, if there is one; the routers of experts have none."""
    if spec.lora is None:
        return None
    targets = spec.lora.target_modules
    config = model.config.get_text_config()
    experts = any(getattr(config, name, None) for name in EXPERTS)
    dropout = spec.lora.dropout
    if experts and dropout:
        log.warning("experts have no dropout in their adapters: training.lora.dropout is 0 here")
        dropout = 0.0
    if experts and isinstance(targets, str):  # PEFT's own choice takes the routers along
        targets = tuple(sorted({*_linear(model), *_fused(model)}))
    return LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
