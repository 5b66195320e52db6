"""Supervised loss on transcripts that share their system turn.

Instructions and tool schemas are the same in every sample: they run once per batch, and their keys
and values are shared.
"""

import torch
from torch.nn import functional as F
from transformers import DynamicCache

IGNORED = -100


def system_turn(tokenizer, instructions, tools):
    """-> token ids of everything before the user's text, as one row"""
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": instructions}, {"role": "user", "content": "@"}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    start = rendered[: rendered.index("@")]
    return torch.tensor([tokenizer(start, add_special_tokens=False)["input_ids"]])


def batch_loss(model, shared, samples, pad):
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([i + [pad] * (longest - len(i)) for i, _ in samples])
    labels = torch.tensor([label + [IGNORED] * (longest - len(label)) for _, label in samples])
    attention = torch.tensor(
        [[1] * (shared.shape[1] + len(i)) + [0] * (longest - len(i)) for i, _ in samples]
    )
    cache = model.model(
        input_ids=shared, use_cache=True, past_key_values=DynamicCache(config=model.config)
    ).past_key_values
    cache.batch_repeat_interleave(len(samples))
    hidden = model.model(
        input_ids=ids, attention_mask=attention, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, :-1]
    target = labels[:, 1:]
    trained = target != IGNORED
    return F.cross_entropy(model.lm_head(hidden[trained]), target[trained])
