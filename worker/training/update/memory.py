"""Who has the memory of the card, in a sentence for somebody whose job did not fit."""

from typing import Any

import torch

GIB = 2**30


def explained(model: Any, optimizer: Any, *, engine_share: float, device: torch.device) -> str:
    """What the trainer's memory is taken by, as far as PyTorch knows.

    Args:
        model: Its weights and gradients.
        optimizer: Its state; None: there is none yet.
        engine_share: Of the card, that an engine beside the trainer may use.
        device: Of the trainer.
    """
    parameters = list(model.parameters())
    weights = sum(map(_bytes, parameters))
    gradients = sum(_bytes(p.grad) for p in parameters if p.grad is not None)
    states = getattr(optimizer, "state", {}).values()
    moments = sum(_bytes(value) for state in states for value in state.values())
    parts = {"weights": weights, "gradients": gradients, "optimizer": moments}
    told = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    if device.type != "cuda":
        return f"GiB: {told}"
    peak = torch.cuda.max_memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    rest = max(0, peak - sum(parts.values()))
    return (
        f"GiB at the peak: {told}, activations and logits {rest / GIB:.2f}, the sampling "
        f"engine up to {engine_share * total / GIB:.2f}, of {total / GIB:.1f}"
    )


def _bytes(tensor: Any) -> int:
    return int(tensor.nelement() * tensor.element_size()) if torch.is_tensor(tensor) else 0
