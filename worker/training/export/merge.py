"""Merge an adapter into its base, one tensor at a time, and check that it is what was trained."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from dressage.spec.merge import MergeReport
from dressage.spec.status import Reason
from worker.training.export.disk import require_room
from worker.training.export.logits import (
    Batch,
    empty_model,
    largest_gap,
    logits,
    prompt_batch,
    streamed_logits,
)
from worker.training.export.weights import Computed, StoredWeights, save_sharded, weights_of
from worker.training.failures import RunFailure
from worker.training.update.model import load_model

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PLAIN = (".lora_A.weight", ".lora_B.weight")  # no DoRA, no biases, no embeddings
WRAPPED = "base_model.model."  # what PEFT puts before the names of the base's layers
# Largest differences of logits. Merging only reorders a sum; storing rounds every weight.
MERGE_TOLERANCE = 1e-3
STORED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
# Shares of the adapter's effect that rounding may take before it is an error, or a warning.
LOST, BLURRED = 0.9, 0.5


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
    parts = _parts(adapter, config, stored)
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


def require_one_adapter(folder: Path) -> None:
    """Check that there is no choice to make.

    Raises:
        RunFailure: There is none, or several.
    """
    found = sorted(path.parent for path in folder.rglob("adapter_config.json"))
    if found == [folder]:
        return
    names = ", ".join(path.name if path != folder else "default" for path in found) or "none"
    raise RunFailure(
        Reason.CONVERSION_FAILED, f"a merge takes one adapter, and there are several: {names}"
    )


@dataclass
class Parts:
    """A base and an adapter whose names fit together.

    Attributes:
        config: Of the merged model.
        model: Base with adapter; the base's weights are on no device.
        layers: Layers with an adapter, by the name of their weight.
        base: The base's weights.
        instead: Whole weights that the adapter brings: a resized vocabulary, modules to save.
        shared: Names without weights of their own, and whose they use.
        dtype: Of the weights that are written.
    """

    config: Any
    model: PeftModel
    layers: dict[str, BaseTunerLayer]
    base: StoredWeights
    instead: dict[str, torch.Tensor]
    shared: dict[str, str]
    dtype: torch.dtype

    @property
    def names(self) -> list[str]:
        """Of all weights of the merged model, in the order of the base."""
        own = [*self.base, *(name for name in self.instead if name not in self.base)]
        return [*own, *(name for name in self.shared if name not in own)]

    def original(self, name: str) -> torch.Tensor:
        """A weight of the base, in float32."""
        if name in self.instead:
            return self.instead[name].float()
        if name not in self.base:
            return self.original(self.shared[name])
        return self.base[name].float()

    def merged(self, name: str) -> torch.Tensor:
        """A weight of the merged model, in float32, by PEFT's own merge of its layer."""
        weight = self.original(name)
        layer = self.layers.get(name)
        if layer is None:
            return weight
        module = layer.get_base_layer()
        hollow = module.weight
        module.weight = Parameter(weight.clone(), requires_grad=False)
        layer.merge()
        result = module.weight.data
        layer.merged_adapters.clear()
        module.weight = hollow
        return result


def _parts(adapter: Path, config: Any, stored: StoredWeights | None) -> Parts | None:
    """None: it is not a matter of one weight after the other."""
    if stored is None or PeftConfig.from_pretrained(adapter).modules_to_save:
        return None
    own = load_file(adapter / ADAPTER_WEIGHTS)
    whole = {n.removeprefix(WRAPPED): tensor for n, tensor in own.items() if ".lora_" not in n}
    if not all(name.endswith(PLAIN) for name in own if ".lora_" in name):
        return None
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, tensor in whole.items():
        if name.endswith("embed_tokens.weight"):
            text.vocab_size = tensor.shape[0]  # tokens were added, or padding was taken away
    hollow = empty_model(config)
    names = set(hollow.state_dict())
    shared = dict(hollow._tied_weights_keys or {}) if text.tie_word_embeddings else {}
    if names - set(shared) - set(stored) - set(whole):
        return None
    model = PeftModel.from_pretrained(hollow, adapter, low_cpu_mem_usage=True).eval()
    # PEFT has moved the adapter to where the base is, which is nowhere.
    placed = {
        name: own[name.replace(".default", "")].float()
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }
    model.load_state_dict(placed, strict=False, assign=True)
    layers = {
        f"{name.removeprefix(WRAPPED)}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    if set(layers) - names or set(whole) - names:
        return None
    return Parts(config, model, layers, stored, whole, shared, _widest(stored))


def _merge_streamed(parts: Parts, out: Path, prompts: Batch) -> MergeReport:
    merged = Computed(parts.names, parts.merged)
    untied = [
        name
        for name, source in parts.shared.items()
        if {name, source} & {*parts.layers, *parts.instead}
        and not torch.equal(merged[name], merged[source])
    ]
    names = [n for n in parts.names if n not in parts.shared or n in untied or n in parts.base]
    wrapped = _wrapped(parts)
    with_adapter = streamed_logits(parts.model, wrapped, prompts)
    with parts.model.disable_adapter():
        without = streamed_logits(parts.model, wrapped, prompts)
    if untied:
        _set_tied(parts.config, False)
    alone = empty_model(parts.config)
    gap = largest_gap(streamed_logits(alone, merged, prompts), with_adapter)
    _check(gap, MERGE_TOLERANCE, "the merged model")
    rounded = Computed(names, lambda name: parts.merged(name).to(_dtype_of(parts, name)))
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
    return _report(parts.dtype, with_adapter, without, gap, stored, untied, streamed=True)


def _merge_whole(adapter: Path, base: str, out: Path, prompts: Batch, config: Any) -> MergeReport:
    """For what is not a matter of one weight after the other: all in memory, in float32."""
    log.warning("this adapter and the files of %s do not fit by name: merged in memory", base)
    model = load_model(base, dtype="float32", use_cpu=True).eval()
    without = logits(model, prompts)
    tied = _untie(model)
    with_adapter = PeftModel.from_pretrained(model, adapter).eval()
    expected = logits(with_adapter, prompts)
    merged = with_adapter.merge_and_unload()
    gap = largest_gap(logits(merged, prompts), expected)
    _check(gap, MERGE_TOLERANCE, "the merged model")
    untied = [] if _tied_again(merged, tied) else [*tied]
    dtype = config.dtype if config.dtype in STORED_TOLERANCE else torch.float32
    merged.to(dtype).save_pretrained(out)
    written = load_model(str(out), dtype="float32", use_cpu=True).eval()
    stored = logits(written, prompts)
    return _report(dtype, expected, without, gap, stored, untied, streamed=False)


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


def _report(
    dtype: torch.dtype,
    expected: torch.Tensor,
    without: torch.Tensor,
    gap: float,
    stored: torch.Tensor,
    untied: list[str],
    *,
    streamed: bool,
) -> MergeReport:
    effect, stored_gap = largest_gap(expected, without), largest_gap(stored, expected)
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
        merge_gap=gap,
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


def _wrapped(parts: Parts) -> Mapping[str, torch.Tensor]:
    """The weights of base with adapter under PEFT's names."""
    own = {
        name: tensor.detach().clone()
        for name, tensor in parts.model.named_parameters()
        if tensor.device.type != "meta"
    }

    def find(name: str) -> torch.Tensor:
        if name in own:
            return own[name]
        plain = name.removeprefix(WRAPPED).replace(".base_layer.", ".")
        return parts.original(plain)

    return Computed([*parts.model.state_dict()], find)


def _widest(stored: StoredWeights) -> torch.dtype:
    """The type of the base's biggest weight, whatever its configuration says."""
    return stored.dtype(max(stored, key=stored.count))


def _dtype_of(parts: Parts, name: str) -> torch.dtype:
    """A weight keeps its type, also where it is not that of most others (norms in float32)."""
    name = name if name in parts.base else parts.shared.get(name, name)
    return parts.base.dtype(name) if name in parts.base else parts.dtype


def _save_generation_config(base: str, out: Path) -> None:
    try:
        GenerationConfig.from_pretrained(base).save_pretrained(out)
    except OSError:  # a model need not have one
        log.info("%s has no generation config", base)
