"""Whether training moves the weights: a rate too small for their type leaves most in place."""

import torch
from torch import nn

OF_EACH = 1024  # entries of a parameter that are remembered


class MovedWeights:
    """Remembers some entries of every trained parameter, evenly spread.

    Args:
        model: Its parameters that are trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = {
            name: _some(parameter).clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def share(self, model: nn.Module) -> float:
        """Share of the remembered entries that are not what they were, from 0 to 1."""
        parameters = dict(model.named_parameters())
        moved = sum(int((_some(parameters[n]) != kept).sum()) for n, kept in self._kept.items())
        return moved / max(1, sum(kept.numel() for kept in self._kept.values()))


def _some(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // OF_EACH)]
