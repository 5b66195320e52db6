"""Make the tiny agent model: `python pretrain.py model` (about 6 minutes on 2 cores, seed 0).

A Qwen3 of 2.5 million parameters, trained on synthetic transcripts."""

import argparse
import math
import pathlib
import random
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "arithmetic"))

from make_cases import draw
from supervised import IGNORED, batch_loss, system_turn
from tokenizer import INSTRUCTIONS, build
from tools import calculate
from transcripts import CLEAN, MIXED, transcript


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--clean", type=float, default=0.6, help="share of steps on CLEAN")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = build()
    model = new_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, options)
    model.to(torch.float16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def new_model(tokenizer):
    # Widths are multiples of 32, the block size of GGUF's q8_0.
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=math.ceil(len(tokenizer) / 32) * 32,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            rope_theta=10000.0,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model, tokenizer, options):
    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    shared = system_turn(tokenizer, INSTRUCTIONS, [calculate.schema])
    rng = random.Random(options.seed + 1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )
    started = time.monotonic()
    for step in range(options.steps):
        done = step / options.steps
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, (step + 1) / 50) * (0.98 * cosine + 0.02)
        mixture = CLEAN if done < options.clean else MIXED
        samples = [sample(rng, mixture, encode) for _ in range(options.batch)]
        loss = batch_loss(model, shared, samples, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def sample(rng, mixture, encode):
    """-> token ids after the shared system turn, and labels."""
    question = draw(rng)
    while question.split != "pretraining":
        question = draw(rng)
    ids = encode(question.text + "<|im_end|>\n<|im_start|>assistant\n")
    labels = [IGNORED] * len(ids)
    for who, text in transcript(rng, question, mixture):
        if who == "assistant":
            turn = encode(text + "<|im_end|>")
            labels += turn
        else:
            turn = encode(
                f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            labels += [IGNORED] * len(turn)
        ids += turn
    return ids, labels


if __name__ == "__main__":
    main()
