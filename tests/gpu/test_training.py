"""Jobs with vLLM beside the trainer, on a real card: what tests/training does with a CPU engine.

Needs a CUDA device and vLLM, and none of the service: `scripts/test-gpu`.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dressage.authoring import Suite
from dressage.spec.job import JobSpec
from tests.training.conftest import events_of
from worker.wire.run_dir import FAILURE, SPEC, SUITE, RunDirectory, RunSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

ROOT = Path(__file__).resolve().parent.parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TRAINING = {
    "max_steps": 4,
    "batch_size": 32,
    "gradient_accumulation": 1,
    "num_generations": 8,
    "max_completion_length": 80,
    "learning_rate": 2e-3,
    "temperature": 1.0,
    "lora": {"r": 16, "alpha": 32, "dropout": 0.0},
    "vllm": {"gpu_memory_utilization": 0.1},
    "logging_steps": 1,
}


@pytest.fixture
def make(tmp_path):
    def go(**training):
        job = json.loads((ARITHMETIC / "job.json").read_text())
        job["agent"]["model"] = str(ROOT / "examples" / "tiny_agent" / "model")
        job |= {
            "training": {**TRAINING, **training},
            "evaluation": {"holdout": 0.1},
            "preflight": {"cases": 2},
            "exports": [],
            "resources": {"gpus": 1},
        }
        run_spec = RunSpec(job=JobSpec.model_validate(job))
        (tmp_path / SPEC).write_text(run_spec.model_dump_json())
        (tmp_path / SUITE).write_bytes(Suite.from_path(ARITHMETIC).to_archive())
        return RunDirectory(tmp_path)

    return go


def start(run):
    return subprocess.Popen(
        [sys.executable, "-m", "worker.training", str(run.path)],
        env={**os.environ, "DRESSAGE_PARENT_PID": str(os.getpid())},
        cwd=ROOT,
    )


def trained(run):
    code = start(run).wait(400)
    assert code == 0, (run.path / FAILURE).read_text()
    return [event["values"] for event in events_of(run, "metrics")]


def holders():
    """Processes that hold memory of the card."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(line) for line in shown.split()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_staleness": 2},
        {"echo": {"coeff": 0.05}, "beta": 0.01},
        {"lora": None, "learning_rate": 3e-4},
        {"load_in_4bit": True},
        {"vllm": {"gpu_memory_utilization": 0.1, "sleep": True}},
        {"dtype": "float16"},
        {"gradient_checkpointing": True},
    ],
    ids=["adapter", "ahead", "echo", "whole", "4bit", "sleep", "float16", "checkpointing"],
)
def test_a_job_trains_on_fresh_rollouts(make, changes):
    before = holders()
    lines = trained(make(**changes))
    assert len(lines) == 4
    for values in lines:
        assert values["sampling/canary_gap/mean"] < 0.1
        assert values["sampling/sampling_logp_difference/mean"] < (
            1.0 if changes.get("max_staleness") else 0.1
        )
        assert values["environments/lost"] == 0
    assert max(values.get("rollouts/age/max") or 0 for values in lines) <= 2
    assert lines[-1]["weights/moved_share"] > 0.5
    assert holders() <= before


@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_nothing_is_left_on_the_card_whoever_is_killed(make, victim):
    before = holders()
    run = make(max_steps=1000)
    process = start(run)
    deadline = time.monotonic() + 300
    while not events_of(run, "progress"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.5)
    if victim == "trainer":
        process.kill()
    else:
        engines = holders() - before - {process.pid}
        assert engines
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
    process.wait(60)
    if victim == "engine":
        assert "sampler_failed" in (run.path / FAILURE).read_text()
    deadline = time.monotonic() + 30
    while holders() - before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert holders() <= before
