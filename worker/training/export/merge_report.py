"""Whether a merged model is what was trained: differences of logits against tolerances."""

import logging
from dataclasses import dataclass

import torch

from dressage.spec.merge import MergeReport
from dressage.spec.status import Reason
from worker.training.export.logits import largest_gap
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)

# Largest differences of logits. Merging only reorders a sum; storing rounds every weight.
MERGE_TOLERANCE = 1e-3
STORED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
# Shares of the adapter's effect that rounding may take before it is an error, or a warning.
LOST, BLURRED = 0.9, 0.5


@dataclass(frozen=True)
class MergeLogits:
    """Logits of the same prompts, shape (tokens, vocabulary).

    Attributes:
        expected: Base and adapter together.
        without: The base alone.
        merged: The merged weights in float32.
        stored: The weights as they were written.
    """

    expected: torch.Tensor
    without: torch.Tensor
    merged: torch.Tensor
    stored: torch.Tensor


def check_merged(merged: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits in float32, before anything is written.

    Raises:
        RunFailure: The merged model does not compute what base and adapter do.
    """
    gap = largest_gap(merged, expected)
    _check(gap, MERGE_TOLERANCE, "the merged model")
    return gap


def merge_report(
    logits: MergeLogits, dtype: torch.dtype, untied: list[str], *, streamed: bool
) -> MergeReport:
    """The report on what was written.

    Raises:
        RunFailure: It differs too much, the adapter changes nothing, or rounding takes it away.
    """
    effect = largest_gap(logits.expected, logits.without)
    stored_gap = largest_gap(logits.stored, logits.expected)
    tolerance = STORED_TOLERANCE[dtype]
    if effect == 0:
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            "the adapter changes nothing: its weights do not apply to this base model",
        )
    _check(stored_gap, tolerance, f"the merged model, stored as {dtype},")
    if stored_gap > LOST * effect:
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            f"the adapter changes less than {dtype}, the type of the base's weights, can express: "
            f"logits by {effect:.1e}, and rounding by {stored_gap:.1e}; export gguf_adapter, or "
            "serve base and adapter",
        )
    if stored_gap > BLURRED * effect:
        log.warning(
            "stored as %s, the merged model is %.1e from what was trained, and training moved the "
            "base by %.1e only: much of it is rounded away; serve base and adapter instead",
            dtype,
            stored_gap,
            effect,
        )
    return MergeReport(
        dtype=str(dtype).removeprefix("torch."),
        adapter_effect=effect,
        merge_gap=largest_gap(logits.merged, logits.expected),
        stored_gap=stored_gap,
        stored_tolerance=tolerance,
        streamed=streamed,
        trained_in_4bit=False,
        untied=tuple(untied),
    )


def _check(gap: float, tolerance: float, what: str) -> None:
    if not gap <= tolerance:
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            f"{what} has logits that differ by {gap:.2g} from base and adapter together; "
            f"{tolerance:g} is allowed",
        )
