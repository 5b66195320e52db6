"""Adapters that change a model as training does, without training."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_MODEL = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_agent" / "model"


def make_adapter(folder, base, *, std=0.15, tokens=(), **config):
    """An adapter that changes much, and the model that it makes of its base."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if tokens:
        tokenizer.add_tokens(list(tokens))
        model.resize_token_embeddings(len(tokenizer))
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    model = get_peft_model(model, LoraConfig(**options)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
