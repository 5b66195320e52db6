"""From the requested specification to the one that runs, with every change listed."""

from dressage.spec.agent import canonical_model_name
from dressage.spec.job import Adjustment, JobSpec
from dressage.spec.training import LoraSpec


def effective_spec(requested: JobSpec, *, suite: str) -> tuple[JobSpec, tuple[Adjustment, ...]]:
    """Resolve names and repair the batch arithmetic.

    Args:
        requested: As it was posted.
        suite: The exact version the suite name stands for, `name@version`.

    Returns:
        The specification that runs and what differs from the requested one.
    """
    adjustments = []
    model = canonical_model_name(requested.agent.model)
    if model != requested.agent.model:
        adjustments.append(
            Adjustment(
                field="agent.model",
                requested=requested.agent.model,
                effective=model,
                reason="the canonical name of this model",
            )
        )
    if suite != requested.suite:
        adjustments.append(
            Adjustment(
                field="suite",
                requested=requested.suite,
                effective=suite,
                reason="a job runs on one exact version",
            )
        )
    training = requested.training
    adjustments += [
        Adjustment(
            field=f"training.{given}",
            requested=given,
            effective=f"training.{own}",
            reason="the name of this field here",
        )
        for given, own in training.renamed.items()
    ]
    if training.load_in_4bit and training.lora is None:
        training = training.model_copy(update={"lora": LoraSpec()})
        adjustments.append(
            Adjustment(
                field="training.lora",
                requested=None,
                effective=LoraSpec().model_dump(mode="json"),
                reason="a 4-bit base cannot be trained itself: load_in_4bit implies an adapter",
            )
        )
    if training.lora is None and training.dtype != "float32":
        adjustments.append(
            Adjustment(
                field="training.dtype",
                requested=training.dtype,
                effective=f"float32 weights, {training.dtype} for passes and in the result",
                reason="most weights would not move: Adam's steps are smaller than this type adds",
            )
        )
    compiles = training.compiles(gpus=requested.resources.gpus)
    if compiles and training.compile is None:
        training = training.model_copy(update={"compile": True})
        adjustments.append(
            Adjustment(
                field="training.compile",
                requested=None,
                effective=True,
                reason="on a GPU with an adapter and vllm the update takes half the time, and "
                "begins half a minute later",
            )
        )
    accumulation = valid_accumulation(
        training.batch_size, training.gradient_accumulation, training.num_generations
    )
    if accumulation != training.gradient_accumulation:
        adjustments.append(
            Adjustment(
                field="training.gradient_accumulation",
                requested=training.gradient_accumulation,
                effective=accumulation,
                reason=f"a step holds whole groups: batch_size {training.batch_size} × "
                f"gradient_accumulation must divide by num_generations {training.num_generations}",
            )
        )
    effective = requested.model_copy(
        update={
            "agent": requested.agent.model_copy(update={"model": model}),
            "suite": suite,
            "training": training.model_copy(update={"gradient_accumulation": accumulation}),
        }
    )
    return effective, tuple(adjustments)


def valid_accumulation(batch_size: int, accumulation: int, num_generations: int) -> int:
    """The smallest accumulation, at least the given one, with which a step holds whole groups."""
    while (batch_size * accumulation) % num_generations:
        accumulation += 1
    return accumulation
