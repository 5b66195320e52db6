"""Merge an adapter into its base, one tensor at a time, and check that it is what was trained."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from dressage.spec.merge import MergeReport
from dressage.spec.status import Reason
from worker.training.export.disk import require_room
from worker.training.export.logits import (
    Batch,
    empty_model,
    logits,
    prompt_batch,
    streamed_logits,
)
from worker.training.export.merge_parts import MergeParts, merge_parts
from worker.training.export.merge_report import (
    STORED_TOLERANCE,
    MergeLogits,
    check_merged,
    merge_report,
)
from worker.training.export.weights import Computed, save_sharded, weights_of
from worker.training.model import load_model
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)


def merge(
    adapter: Path, base: str, out: Path, probes: Sequence[str], *, trained_in_4bit: bool
) -> MergeReport:
    """Write base + adapter as one model, with the adapter's tokenizer and chat template.

    The sum is made in float32 by PEFT, layer by layer, and stored in the base's own type. The
    check needs no more memory: each forward pass reads a layer's weights when it comes to it.

    Args:
        adapter: A PEFT directory with one adapter.
        base: A directory, or a name of the hub.
        out: The directory to make.
        probes: Texts whose logits are compared.
        trained_in_4bit: For the report.

    Raises:
        RunFailure: The merged model does not compute what base and adapter compute together, or
            the adapter changes nothing, or it cannot be merged.
    """
    require_one_adapter(adapter)
    require_trained(adapter)
    config = AutoConfig.from_pretrained(base)
    if getattr(config, "quantization_config", None):
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            f"the weights of {base!r} are stored quantized, and an adapter can only be merged into "
            "whole ones; train on the model as it was published, with load_in_4bit",
        )
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    prompts = prompt_batch(tokenizer, probes)
    stored = weights_of(base)
    parts = merge_parts(adapter, config, stored)
    if parts is None:
        report = _merge_whole(adapter, base, out, prompts, config)
    else:
        require_room(out.parent, parts.base.size, "the merge")
        report = _merge_streamed(parts, out, prompts)
    tokenizer.save_pretrained(out)
    _save_generation_config(base, out)
    log.info(
        "merged; logits agree within %.1e, and %.1e as stored", report.merge_gap, report.stored_gap
    )
    return report.model_copy(update={"trained_in_4bit": trained_in_4bit})


def require_trained(folder: Path) -> None:
    """Check that training has moved an adapter at all: its second half begins as zeros.

    Raises:
        RunFailure: It has not.
    """
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        halves = [name for name in file.keys() if "lora_B" in name or "lora_embedding_B" in name]  # noqa: SIM118
        moved = not halves or any(bool(file.get_tensor(name).any()) for name in halves)
    if not moved:
        raise RunFailure(
            Reason.CONVERSION_FAILED,
            "the adapter changes nothing: training has not moved its weights (learning rate, "
            "warm-up, or no group with a spread of rewards)",
        )


def require_one_adapter(folder: Path) -> None:
    """Check that there is no choice to make.

    Raises:
        RunFailure: There is no adapter, or there are several.
    """
    found = sorted(path.parent for path in folder.rglob("adapter_config.json"))
    if found == [folder]:
        return
    names = ", ".join(path.name if path != folder else "default" for path in found) or "none"
    raise RunFailure(
        Reason.CONVERSION_FAILED, f"a merge takes one adapter, and there are several: {names}"
    )


def _merge_streamed(parts: MergeParts, out: Path, prompts: Batch) -> MergeReport:
    merged = Computed(parts.names, parts.merged)
    untied = [
        name
        for name, source in parts.shared.items()
        if {name, source} & {*parts.layers, *parts.instead}
        and not torch.equal(merged[name], merged[source])
    ]
    names = [n for n in parts.names if n not in parts.shared or n in untied or n in parts.base]
    wrapped = parts.wrapped()
    with_adapter = streamed_logits(parts.model, wrapped, prompts)
    with parts.model.disable_adapter():
        without = streamed_logits(parts.model, wrapped, prompts)
    if untied:
        _set_tied(parts.config, False)
    alone = empty_model(parts.config)
    merged_logits = streamed_logits(alone, merged, prompts)
    check_merged(merged_logits, with_adapter)
    rounded = Computed(names, lambda name: parts.merged(name).to(parts.dtype_of(name)))
    save_sharded(rounded, out)
    parts.config.dtype = parts.dtype
    parts.config.save_pretrained(out)
    written = weights_of(str(out))
    assert written
    sources = parts.shared if not untied else {}
    read = Computed(
        parts.names,
        lambda name: written[name if name in written else sources[name]].float(),
    )
    stored = streamed_logits(empty_model(parts.config), read, prompts)
    seen = MergeLogits(with_adapter, without, merged_logits, stored)
    return merge_report(seen, parts.dtype, untied, streamed=True)


def _merge_whole(adapter: Path, base: str, out: Path, prompts: Batch, config: Any) -> MergeReport:
    """Merge the whole model in memory, in float32, where weights do not fit by name."""
    log.warning("this adapter and the files of %s do not fit by name: merged in memory", base)
    model = load_model(base, dtype="float32", use_cpu=True).eval()
    without = logits(model, prompts)
    tied = _untie(model)
    with_adapter = PeftModel.from_pretrained(model, adapter).eval()
    expected = logits(with_adapter, prompts)
    merged = with_adapter.merge_and_unload()
    merged_logits = logits(merged, prompts)
    check_merged(merged_logits, expected)
    untied = [] if _tied_again(merged, tied) else [*tied]
    dtype = config.dtype if config.dtype in STORED_TOLERANCE else torch.float32
    merged.to(dtype).save_pretrained(out)
    written = load_model(str(out), dtype="float32", use_cpu=True).eval()
    stored = logits(written, prompts)
    seen = MergeLogits(expected, without, merged_logits, stored)
    return merge_report(seen, dtype, untied, streamed=False)


def _untie(model: Any) -> dict[str, str]:
    """Give the output layer weights of its own: merged, they may no longer be the input's."""
    if not model.config.get_text_config().tie_word_embeddings:
        return {}
    tied = dict(model.all_tied_weights_keys)
    model.get_output_embeddings().weight = Parameter(
        model.get_output_embeddings().weight.detach().clone()
    )
    _set_tied(model.config, False)
    model.all_tied_weights_keys = {}
    return tied


def _tied_again(model: Any, tied: dict[str, str]) -> bool:
    """Share the weights as before, if the adapter has left them equal."""
    output, source = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if not tied or not torch.equal(output, source):
        return False
    _set_tied(model.config, True)
    model.all_tied_weights_keys = tied
    model.tie_weights()
    return True


def _set_tied(config: Any, tied: bool) -> None:
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied


def _save_generation_config(base: str, out: Path) -> None:
    try:
        GenerationConfig.from_pretrained(base).save_pretrained(out)
    except OSError:  # a model need not have one
        log.info("%s has no generation config", base)
