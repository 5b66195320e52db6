"""A base and an adapter whose weights fit together by name, read one tensor at a time."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch.nn import Parameter

from worker.training.export.logits import empty_model
from worker.training.export.weights import Computed, StoredWeights

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PLAIN = (".lora_A.weight", ".lora_B.weight")  # no DoRA, no biases, no embeddings
WRAPPED = "base_model.model."  # what PEFT puts before the names of the base's layers


@dataclass
class MergeParts:
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
        """Names of all weights of the merged model, in the order of the base."""
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

    def wrapped(self) -> Mapping[str, torch.Tensor]:
        """The weights of base with adapter under PEFT's names."""
        own = {
            name: tensor.detach().clone()
            for name, tensor in self.model.named_parameters()
            if tensor.device.type != "meta"
        }

        def find(name: str) -> torch.Tensor:
            if name in own:
                return own[name]
            plain = name.removeprefix(WRAPPED).replace(".base_layer.", ".")
            return self.original(plain)

        return Computed([*self.model.state_dict()], find)

    def dtype_of(self, name: str) -> torch.dtype:
        """A weight keeps its type, also where it is not that of most others (norms in float32)."""
        name = name if name in self.base else self.shared.get(name, name)
        return self.base.dtype(name) if name in self.base else self.dtype


def merge_parts(adapter: Path, config: Any, stored: StoredWeights | None) -> MergeParts | None:
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
    return MergeParts(config, model, layers, stored, whole, shared, _widest(stored))


def _widest(stored: StoredWeights) -> torch.dtype:
    """The type of the base's biggest weight, whatever its configuration says."""
    return stored.dtype(max(stored, key=stored.count))
