"""Merge an adapter into its base, and check that the result is what was trained."""

import logging
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from dressage.spec.status import Reason
from worker.training.failures import RunFailure
from worker.training.update.model import load_model

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # of logits in float32; merging only reorders a sum


def merge(adapter: Path, base: str, out: Path, probe: str) -> None:
    """Write base + adapter as one model, with the adapter's tokenizer and chat template.

    The sum is made in float32 and stored in the base's own type.

    Raises:
        RunFailure: The merged model does not compute what base and adapter compute together, or
            the adapter changes nothing.
    """
    model = load_model(base, dtype="float32", use_cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = tokenizer(probe, return_tensors="pt")["input_ids"]
    before = _logits(model, ids)
    with_adapter = PeftModel.from_pretrained(model, adapter)
    expected = _logits(with_adapter, ids)
    merged = with_adapter.merge_and_unload()
    got = _logits(merged, ids)
    gap = (got - expected).abs().max().item()
    if gap > TOLERANCE:
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            f"the merged model's logits differ by {gap:.2g} from base and adapter together",
        )
    if torch.equal(before, expected):
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            "the adapter changes nothing: its weights do not apply to this base model",
        )
    log.info("merged; logits agree within %.1e", gap)
    stored = getattr(AutoConfig.from_pretrained(base), "dtype", None) or torch.float32
    merged.to(stored).save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model(input_ids=ids).logits.float()
