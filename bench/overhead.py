"""What our service's training costs over a bare TRL script, per step after warm-up.

Both run the same job: tiny agent, calculator tool, same batch, same sampling. The learning rate is
next to nothing, so that both policies stay the base model's and play rollouts of the same length.
Runs alternate; the figure is the ratio of the medians of all steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "arithmetic"
MODEL = ROOT / "examples" / "tiny_agent" / "model"
WARM_UP = 3
CONFIG = {
    "batch_size": 64,
    "gradient_accumulation": 1,
    "num_generations": 8,
    "learning_rate": 1e-9,
    "adam_beta2": 0.99,
    "max_completion_length": 80,
    "max_tool_iterations": 2,
    "temperature": 1.0,
    "mask_truncated_completions": False,
    "dtype": "float32",
    "lora": {"r": 16, "alpha": 32, "dropout": 0.0},
    "logging_steps": 1,
}
INSTRUCTIONS = "Solve the exercise. Use the calculator."


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(bare_trl(options.bare)))
        return
    steps, rounds = (10, 2) if options.quick else (20, 4)
    bare, ours = [], []
    for number in range(rounds):
        bare += bare_steps(steps)
        ours += our_steps(steps)
        print(
            f"round {number + 1}: bare {statistics.median(bare):.3f} s, "
            f"ours {statistics.median(ours):.3f} s a step",
            flush=True,
        )
    print(f"{'':8}{'steps':>8}{'median s':>10}")
    for name, times in (("bare", bare), ("ours", ours)):
        print(f"{name:8}{len(times):>8}{statistics.median(times):>10.3f}")
    ratio = statistics.median(ours) / statistics.median(bare)
    print(json.dumps({"wall_ratio": round(ratio, 4)}))


def bare_steps(steps):
    done = subprocess.run(
        [sys.executable, __file__, "--bare", str(steps)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def our_steps(steps):
    """Run the training process as a worker does, and read its events."""
    from dressage.authoring import Suite

    job = {
        "name": "overhead",
        "agent": {"model": str(MODEL), "instructions": INSTRUCTIONS, "tools": ["calculate"]},
        "suite": "arithmetic@1",
        "rewards": [{"measure": "correct_answer"}],
        "training": {**CONFIG, "max_steps": steps},
        "evaluation": {"holdout": 0},
        "resources": {"gpus": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "spec.json").write_text(json.dumps({"job": job}))
        (run / "suite.zip").write_bytes(Suite.from_path(EXAMPLE).to_archive())
        subprocess.run(
            [sys.executable, "-m", "worker.training", str(run)], capture_output=True, check=True
        )
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    # The wall from the end of a step to the end of the next has everything in it.
    ends = [datetime.fromisoformat(e["time"]) for e in events if e["type"] == "progress"]
    return [(b - a).total_seconds() for a, b in pairwise(ends)][WARM_UP:]


def bare_trl(steps):
    """The script that somebody would write without us."""
    sys.path.insert(0, str(EXAMPLE))
    import re

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tools import calculate as example_tool
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    # Without `-> str`: transformers would add a `return` entry to the schema, the model would see
    # another prompt than ours, and call its tool less often.
    def calculate(expression: str):
        """Evaluate arithmetic.

        Args:
            expression: The expression.
        """
        return example_tool(expression)

    def correct(completions, answer, **_):
        rewards = []
        for completion, expected in zip(completions, answer, strict=True):
            last = completion[-1]
            text = last.get("content") or "" if last["role"] == "assistant" else ""
            numbers = re.findall(r"-?\d+", text)
            rewards.append(float(bool(numbers) and numbers[-1] == expected))
        return rewards

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.time())

    rows = [json.loads(line) for line in (EXAMPLE / "cases.jsonl").read_text().splitlines()]
    dataset = Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": INSTRUCTIONS},
                    {"role": "user", "content": row["input"]},
                ],
                "answer": row["expect"]["answer"],
            }
            for row in rows
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=[correct],
            train_dataset=dataset,
            tools=[calculate],
            peft_config=LoraConfig(
                r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"
            ),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=CONFIG["batch_size"],
                gradient_accumulation_steps=1,
                num_generations=CONFIG["num_generations"],
                learning_rate=CONFIG["learning_rate"],
                adam_beta2=CONFIG["adam_beta2"],
                max_completion_length=CONFIG["max_completion_length"],
                max_tool_calling_iterations=CONFIG["max_tool_iterations"],
                temperature=CONFIG["temperature"],
                top_k=0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return [b - a for a, b in pairwise(ends)][WARM_UP:]


if __name__ == "__main__":
    main()
