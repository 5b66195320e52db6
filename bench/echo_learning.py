"""Does ECHO need fewer steps than GRPO? Matched jobs on the file world, same seeds, one difference.

Steps to the target are read off the held-out evaluations, by linear interpolation; a job that never
gets there counts with its last step. The environment's cross-entropy is taken on one fixed set of
held-out rollouts, those of the base model, under every trained model.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "file_world"
MODEL = ROOT / "examples" / "tiny_agent" / "shell_model"
TARGET = 0.5
WARM_UP = 3
LOADING = threading.Lock()  # transformers loads one model at a time
ARMS = {"grpo": 0.0, "echo": 0.05}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, fewer steps")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--parallel", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--gpu", action="store_true", help="on the GPU of this machine")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 2, 16
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
        with ThreadPoolExecutor(options.parallel) as threads:
            done = list(threads.map(lambda job: run(Path(folder), *job, options), jobs))
        report(dict(zip(jobs, done, strict=True)), options)


def run(folder, arm, seed, options):
    from dressage.authoring import Suite

    job = json.loads((EXAMPLE / "job.json").read_text())
    job["agent"]["model"] = str(MODEL)
    job["suite"] = "file-world@1"
    job["training"] |= {
        "seed": seed,
        "max_steps": options.steps,
        "echo": {"coeff": ARMS[arm]},
        "pause_after_dead_steps": None,
    }
    if options.quick:
        job["evaluation"]["every_steps"] = 4
    job["resources"]["gpus"] = int(options.gpu)
    place = folder / f"{arm}-{seed}"
    place.mkdir()
    (place / "spec.json").write_text(json.dumps({"job": job}))
    (place / "suite.zip").write_bytes(Suite.from_path(EXAMPLE).to_archive())
    with (place / "output.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.training", str(place)], stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit((place / "output.log").read_text()[-3000:])
    events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
    curve = [
        e["data"] for e in events if e["type"] == "evaluation" and "step-" in e["data"]["name"]
    ]
    ends = [datetime.fromisoformat(e["time"]) for e in events if e["type"] == "progress"]
    evaluated = {point["step"] for point in curve}
    times = [
        (b - a).total_seconds()
        for step, (a, b) in enumerate(pairwise(ends), start=1)
        if step not in evaluated  # an evaluation lies between the two
    ]
    result = {
        "steps": steps_to_target([(point["step"], point["pass_rate"]) for point in curve]),
        "curve": [point["pass_rate"] for point in curve],
        "step_time": statistics.median(times[WARM_UP:]),
        "memory": usage.ru_maxrss,
        "cross_entropy": fixed_cross_entropy(place, events),
    }
    shown = " ".join(f"{value:.2f}" for value in result["curve"])
    print(f"{arm} seed {seed}: {result['steps']:.1f} steps to {TARGET}; {shown}", flush=True)
    return result


def steps_to_target(curve):
    before = (0, 0.0)
    for step, rate in curve:
        if rate >= TARGET:
            return before[0] + (step - before[0]) * (TARGET - before[1]) / (rate - before[1])
        before = (step, rate)
    return before[0]


def fixed_cross_entropy(place, events):
    """Nats per observation token of the base model's rollouts, under the weights of the end."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with LOADING:
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, place / "final").eval()
    losses = []
    for event in events:
        rollout = event["data"]
        if event["type"] != "rollout" or rollout["phase"] != "before":
            continue
        ids = torch.tensor([rollout["token_ids"]])
        with torch.no_grad():
            predicted = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        observed = torch.tensor([role == "o" for role in rollout["roles"][1:]])
        chosen = predicted.gather(1, ids[0, 1:, None])[:, 0][observed]
        losses += (-chosen).tolist()
    return statistics.fmean(losses)


def report(done, options):
    seeds = range(options.seeds)

    def column(arm, name):
        return [done[arm, seed][name] for seed in seeds]

    print(f"{'arm':6}{'steps to ' + str(TARGET):>16}{'held-out CE':>14}{'step s':>9}{'MB':>8}")
    for arm in ARMS:
        steps, losses = column(arm, "steps"), column(arm, "cross_entropy")
        spread = f" ± {statistics.stdev(steps):.1f}"
        print(
            f"{arm:6}{statistics.fmean(steps):>9.1f}{spread:>7}{statistics.fmean(losses):>14.3f}"
            f"{statistics.median(column(arm, 'step_time')):>9.3f}"
            f"{statistics.median(column(arm, 'memory')) / 1024:>8.0f}"
        )
    grpo, echo = column("grpo", "steps"), column("echo", "steps")
    rng = random.Random(0)
    draws = sorted(
        ratio([grpo[i] for i in chosen], [echo[i] for i in chosen])
        for chosen in (rng.choices(seeds, k=len(seeds)) for _ in range(10_000))
    )
    figures = {
        "seeds": options.seeds,
        "steps_ratio": ratio(grpo, echo),
        "steps_ratio_low": draws[len(draws) // 40],
        "steps_ratio_high": draws[-len(draws) // 40],
        "env_ce_ratio": ratio(column("echo", "cross_entropy"), column("grpo", "cross_entropy")),
        "step_time_ratio": statistics.median(column("echo", "step_time"))
        / statistics.median(column("grpo", "step_time")),
        "peak_memory_ratio": statistics.median(column("echo", "memory"))
        / statistics.median(column("grpo", "memory")),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def ratio(above, below):
    return statistics.fmean(above) / statistics.fmean(below)


if __name__ == "__main__":
    main()
