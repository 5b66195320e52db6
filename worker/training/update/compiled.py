"""Decoder layers as compiled code: few large kernels in place of thousands of small ones."""

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

RECOMPILATIONS = 64  # one for each width, and for each kind of layer


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of a causal language model, for every width it meets."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        log.warning("the layers of %s are not where they are expected: not compiled", type(model))
        return
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    torch._dynamo.config.cache_size_limit = RECOMPILATIONS
    for layer in layers:
        layer.compile(dynamic=False)
