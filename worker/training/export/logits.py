"""Logits of models whose weights are read as the forward pass comes to them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoModelForCausalLM

Batch = dict[str, torch.Tensor]  # token ids and attention mask


def prompt_batch(tokenizer: Any, texts: Sequence[str]) -> Batch:
    """All prompts at once: each layer's weights are read once for them."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    encoded = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def empty_model(config: Any) -> Any:
    """A model in float32 whose weights are on no device."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def streamed_logits(
    model: Any, weights: Mapping[str, torch.Tensor], prompts: Batch
) -> torch.Tensor:
    """Logits of a model whose weights are read as the forward pass comes to them."""
    model.eval()
    cpu_offload(model, execution_device=torch.device("cpu"), state_dict=weights)
    try:
        return logits(model, prompts)
    finally:
        remove_hook_from_submodules(model)


@torch.no_grad()
def logits(model: Any, prompts: Batch) -> torch.Tensor:
    """Logits of every token but padding, shape (tokens, vocabulary)."""
    found = model(**prompts, use_cache=False).logits.float()
    return found[prompts["attention_mask"].bool()]


def largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference between numbers at the same place; NaN if any is NaN."""
    return (one - other).abs().max().item()
