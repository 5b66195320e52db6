"""Teach the tiny agent to use a shell: `python learn_shell.py shell_model` (2 minutes on 2 cores).

The transcripts look for files at random and find them at random, so the model learns what a shell
is like, and nothing about the folder in which they are: that is left to reinforcement learning.
"""

import argparse
import json
import math
import pathlib
import random
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).resolve().parent
WORLD = HERE.parent / "file_world"
sys.path.insert(0, str(WORLD))

from make_files import draw, question
from supervised import IGNORED, batch_loss, system_turn
from world import FOLDERS, FileWorld, history

from dressage.authoring.environment import environment_tools


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    model = AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32)
    train(model, tokenizer, options)
    model.to(torch.float16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def train(model, tokenizer, options):
    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    instructions = json.loads((WORLD / "job.json").read_text())["agent"]["instructions"]
    tools = [tool.schema for tool in environment_tools(FileWorld)]
    shared = system_turn(tokenizer, instructions, tools)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(options.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, (step + 1) / 20) * (0.98 * cosine + 0.02)
        samples = [sample(rng, encode) for _ in range(options.batch)]
        loss = batch_loss(model, shared, samples, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f}", flush=True)


def sample(rng, encode):
    """-> token ids after the shared system turn, and labels: all that follows the question."""
    file = draw(rng)
    ids = encode(f"{question(file)}<|im_end|>\n<|im_start|>assistant\n")
    labels = [IGNORED] * len(ids)
    for who, said in transcript(rng, file):
        text = (
            f"{said}<|im_end|>"
            if who == "agent"
            else f"\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        turn = encode(text)
        ids += turn
        labels += turn
    return ids, labels


def transcript(rng, file):
    content = str(rng.randint(10, 99))
    found = rng.random() < 0.5
    return [
        ("agent", call(f"cd {rng.choice(FOLDERS)}")),
        ("world", "ok"),
        ("agent", call(f"cat {file}")),
        ("world", content if found else history(rng.choice(FOLDERS))),
        ("agent", f"The answer is {content}." if found else "Not here."),
    ]


def call(line):
    return f'<tool_call>\n{{"name": "sh", "arguments": {{"line": "{line}"}}}}\n</tool_call>'


if __name__ == "__main__":
    main()
