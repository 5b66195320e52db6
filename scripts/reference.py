"""Write what the documents say of the code: `python scripts/reference.py`.

These are docs/training.md, docs/openapi.json and the tree in ARCHITECTURE.md.
"""

import ast
import json
import re
import typing
from pathlib import Path

from app.main import create_app
from app.settings import Settings
from dressage.spec.preflight import PreflightSpec
from dressage.spec.training import EchoSpec, EvaluationSpec, LoraSpec, TrainingSpec, VllmSpec

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
TREE = re.compile(r"(?<=<!-- the tree -->\n).*(?=<!-- end of the tree -->)", re.DOTALL)
OURS = "–"
# What a field is called where it takes effect: in TRL's GRPOConfig, or PEFT's LoraConfig.
MAPS_TO = {
    "training.epochs": "num_train_epochs",
    "training.batch_size": "per_device_train_batch_size",
    "training.gradient_accumulation": "gradient_accumulation_steps",
    "training.lr_scheduler": "lr_scheduler_type",
    "training.dtype": "bf16 / fp16 (GPU), model dtype",
    "training.load_in_4bit": "BitsAndBytesConfig",
    "training.gradient_checkpointing": "activation_checkpointing",
    "training.compile": "torch_compile",
    "training.vllm.mode": "vllm_mode",
    "training.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "training.vllm.max_model_len": "vllm_max_model_length",
    "training.vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "training.lora.alpha": "lora_alpha",
    "training.lora.dropout": "lora_dropout",
    **{
        f"training.{name}": OURS
        for name in (
            *("max_tool_iterations", "tool_timeout", "max_tool_output", "echo", "lora", "vllm"),
            *("max_staleness", "micro_batch_tokens", "vllm.sleep"),
            *("resample_dead_groups", "pause_after_dead_steps"),
        )
    },
}
INTRODUCTION = """# Training: every field

Made from the specification by `scripts/reference.py`. Lengths are tokens, times are seconds.

A step plays `batch_size` × `gradient_accumulation` rollouts, `num_generations` for each case. If that does not divide, `gradient_accumulation` is raised to the next value that does, and the job lists the adjustment. Within the step rollouts of like length share a forward pass: as many as have the tokens of `batch_size` of the longest kind (`micro_batch_tokens`). Losses and gradients are those of TRL with the whole step in one batch (its `bnpo` over the tokens of the step); rollouts that cannot teach are left out of the passes, not of the averages, and `entropy` is that of the others.

**Truncated rollouts** (cut at `max_completion_length` or at the model's context) are left out of the loss while `mask_truncated_completions` is on. They are left out of ECHO's term, too. Switch it off where rambling should cost something.

**ECHO** ([arXiv 2605.24517](https://arxiv.org/abs/2605.24517)) adds coeff × cross-entropy of what tools and environments answered. Its term is at temperature 1 whatever the sampling is, counts result bodies only, and never the prompt. `coeff: 0` gives the weights of plain GRPO to the bit, with ECHO's curves (`echo/cross_entropy` per step, `environment_cross_entropy` per evaluation).

**What is proved**: pass rate before and after on held-out cases, with a paired interval that is never of width 0 and never outside of −1…1 (Bonett & Price's for passes, Student's for rewards; below 5 cases, or 20 for rewards, there is none, and `few` says where one is wider than it need be). `python bench/coverage.py` prints how often they hold the true value: 94 to 97 %. `pass_rate_of_all` counts cases that could not be scored as failed.

**Whole weights** (no `lora`) are trained in float32 and stored in `dtype`: Adam's steps are smaller than bfloat16 can add, and 9 % of the weights would ever move. `weights/moved_share` and `result.moved_weights` say how many have.

**Steps that teach nothing** (no group with a spread of rewards, or only masked rollouts) are counted, and end in a pause (`pause_after_dead_steps`). Spread has one meaning everywhere, and advantages are made in double precision.

**On a GPU** `vllm` writes the rollouts, and `max_staleness` lets them run ahead: [gpu.md](gpu.md).

**Keeping the best weights**: with `evaluation.every_steps`, half of the held-out cases choose, the other half prove; the gain is never computed on the cases that chose.
"""


def written():
    """The text of each file that this writes."""
    return {
        DOCS / "training.md": training(),
        DOCS / "openapi.json": openapi(),
        ARCHITECTURE: TREE.sub(lambda _: tree(), ARCHITECTURE.read_text()),
    }


def openapi():
    # Nothing is connected before the service starts.
    settings = Settings(
        database_url="postgresql://x", redis_url="redis://x", storage="/", runs_dir="/"
    )
    return json.dumps(create_app(settings).openapi(), indent=1, ensure_ascii=False) + "\n"


def tree():
    """Every module with the first sentence of its docstring."""
    lines = [line for part in ("dressage", "app", "worker") for line in branch(ROOT / part)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def branch(folder, depth=0):
    yield entry(folder / "__init__.py", f"{folder.name}/", depth)
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield entry(path, path.name, depth + 1)
    for child in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from branch(child, depth + 1)


def entry(file, name, depth):
    first = ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]
    return f"{'  ' * depth + name:<30} {first}"


def training():
    tables = [
        section("training", TrainingSpec),
        section("training.lora", LoraSpec),
        section("training.echo", EchoSpec),
        section("training.vllm", VllmSpec),
        section("evaluation", EvaluationSpec),
        section("preflight", PreflightSpec),
    ]
    return "\n".join([INTRODUCTION, *tables])


def section(prefix, spec):
    rows = [
        f"## `{prefix}`\n",
        "| field | default | values | TRL / PEFT | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, field in spec.model_fields.items():
        ours = OURS if prefix in ("training.echo", "evaluation", "preflight") else name
        cells = [
            f"`{name}`",
            "required" if field.is_required() else f"`{plain(default_of(field))}`",
            values(field),
            MAPS_TO.get(f"{prefix}.{name}", ours),
            field.description or "",
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def values(field):
    choices = [
        argument
        for part in (field.annotation, *typing.get_args(field.annotation))
        if typing.get_origin(part) is typing.Literal
        for argument in typing.get_args(part)
    ]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(rule, key)}"
        for rule in field.metadata
        for key, sign in signs.items()
        if getattr(rule, key, None) is not None
    ]
    return ", ".join(bounds) or kind(field.annotation)


def kind(annotation):
    parts = typing.get_args(annotation) or (annotation,)
    names = [getattr(part, "__name__", str(part)) for part in parts]
    return " or ".join("none" if name == "NoneType" else name for name in names)


def default_of(field):
    return field.get_default(call_default_factory=True)


def plain(value):
    if isinstance(value, dict | list):
        return json.dumps(value)
    return (
        {None: "none", True: "true", False: "false"}.get(value, value)
        if not isinstance(value, int | float) or isinstance(value, bool)
        else value
    )


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
