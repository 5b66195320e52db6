"""The trainer's weights, written straight into an engine's own matrices: no files, no merged copy.

The trainer says once where its weights lie in the card's memory (`sources`); the engine, in a
process of its own, reads them there (`EngineWeights`) each time it is told to. An adapter is
written as base + scale · B · A.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel

# Engines keep these as one matrix, in this order.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")  # an engine may have more rows
ADAPTER = "default"


class UnknownWeights(Exception):
    """The engine has no place for weights that are trained; the message names them."""


@dataclass(frozen=True)
class Place:
    """Where a weight may lie in an engine: the name of a matrix and the first of its rows."""

    name: str
    first_row: int


@dataclass(frozen=True)
class Source:
    """One trained weight, in memory that both processes see.

    Attributes:
        places: Where the engine may have it; the first that exists counts.
        base: The weight itself, or what an adapter changes; 4-bit values with `quantized`.
        down: A of an adapter, (r, in); None: there is no adapter.
        up: B of an adapter, (out, r).
        scale: What B · A is multiplied by.
        quantized: How to read 4-bit values: bitsandbytes' packed state; None: they are plain.
    """

    places: tuple[Place, ...]
    base: torch.Tensor
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    scale: float = 1.0
    quantized: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return int(self.base.shape[0] if self.up is None else self.up.shape[0])


def sources(model: Any) -> list[Source]:
    """Every weight of a model that training moves, or that is not what the engine has loaded.

    Args:
        model: As it is trained: whole, or with an adapter.
    """
    if isinstance(model, PeftModel):
        return list(_adapted(model))
    modules = dict(model.named_modules())
    return [
        Source(_places(name, modules), parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _adapted(model: PeftModel) -> Iterator[Source]:
    base_model = model.get_base_model()
    modules = dict(base_model.named_modules())
    for name, module in modules.items():
        if ADAPTER not in getattr(module, "lora_A", {}):
            continue
        weight = module.base_layer.weight
        state = getattr(weight, "quant_state", None)
        yield Source(
            _places(f"{name}.weight", modules),
            weight.detach().data,
            module.lora_A[ADAPTER].weight.detach(),
            module.lora_B[ADAPTER].weight.detach(),
            float(module.scaling[ADAPTER]),
            None if state is None else state.as_dict(packed=True),
        )


def _places(name: str, modules: Mapping[str, Any]) -> tuple[Place, ...]:
    """Under its own name; or as a part of a fused matrix, behind its siblings."""
    path, _, kind = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    found = [Place(name, 0)]
    for fused, parts in FUSED.items():
        if last in parts:
            before = [f"{parent}.{part}" for part in parts[: parts.index(last)]]
            first = sum(_rows(modules[sibling]) for sibling in before)
            found.append(Place(f"{parent}.{fused}.{kind}", first))
    return tuple(found)


def _rows(module: Any) -> int:
    return int(getattr(module, "base_layer", module).out_features)


class EngineWeights:
    """The engine's side: its matrices, and what is written into them.

    Args:
        parameters: Of the engine, by name.
        given: The trainer's weights.

    Raises:
        UnknownWeights: There is no place for some of them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], given: Sequence[Source]) -> None:
        found = [(source, _target(parameters, source)) for source in given]
        missing = [source.places[0].name for source, target in found if target is None]
        if missing:
            raise UnknownWeights(", ".join(missing[:5]) + (" …" if len(missing) > 5 else ""))
        self._pairs = [(source, target) for source, target in found if target is not None]

    @torch.no_grad()
    def write(self) -> None:
        """Put the trainer's weights, as they are now, into the engine's."""
        for source, target in self._pairs:
            exact = _plain(source)
            if source.down is not None and source.up is not None:
                exact = torch.addmm(
                    exact, source.up.float(), source.down.float(), alpha=source.scale
                )
            target.copy_(_dithered(exact) if target.dtype is torch.bfloat16 else exact)


def _target(parameters: Mapping[str, torch.Tensor], source: Source) -> torch.Tensor | None:
    rows = source.rows
    for place in source.places:
        matrix = parameters.get(place.name)
        if matrix is None:
            continue
        whole = place is source.places[0] and not place.name.endswith(PADDED)
        target = matrix.data[place.first_row : place.first_row + rows]
        if target.shape[0] == rows and (not whole or matrix.shape[0] == rows):
            return target
    return None


def _dithered(exact: torch.Tensor) -> torch.Tensor:
    """Float32 to values that bfloat16 has, up or down by chance, so that the mean is right.

    A base lies on bfloat16's grid: rounded to the nearest, base + B · A is the base again for as
    long as the adapter adds less than half a step, and the sampler would stay behind the trainer.
    The chances are the same each time; what bfloat16 has already stays as it is.
    """
    numbers = torch.Generator(exact.device).manual_seed(0)
    bits = exact.contiguous().view(torch.int32)
    lower = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=exact.device, generator=numbers
    )
    return ((bits + lower) & -(1 << 16)).view(torch.float32)


def _plain(source: Source) -> torch.Tensor:
    if source.quantized is None:
        return source.base.float()
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # It takes the dictionary apart.
    state = QuantState.from_dict(dict(source.quantized), device=source.base.device)
    return dequantize_4bit(source.base, state).float()
