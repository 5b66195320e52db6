"""One run in two processes, as on two GPUs: gloo on the CPU in place of NCCL."""

import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import events_of
from worker.wire.checkpoints import newest_complete
from worker.wire.run_dir import FAILURE, MANIFEST, PAUSE

TRAINING = {
    "max_steps": 3,
    "batch_size": 4,
    "save_steps": 1,
    "echo": {"coeff": 0.05},
    "learning_rate": 0.01,
}


def start(run):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "worker.training.pipeline.launch",
            str(run.path),
            "--processes",
            "2",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=(run.path / "output.log").open("wb"),
        stderr=subprocess.STDOUT,
    )


def weights(run):
    return load_file(run.path / "final" / "adapter_model.safetensors")


def cases_by_step(run):
    found = {}
    for rollout in events_of(run, "rollout"):
        if rollout["phase"] == "train":
            found.setdefault(rollout["step"], []).append(rollout["case_id"])
    return {step: sorted(cases) for step, cases in found.items()}


# In a world of its own: what crosses between the processes must not hold its socket.
WORLD = '''
from dressage.authoring import Environment

class World(Environment):
    def reset(self, case):
        self.calls = 0

    def calculate(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: The expression.
        """
        self.calls += 1
        return str(eval(expression, {}))
'''


@pytest.fixture
def two(make_run, job_spec):
    agent = {key: value for key, value in job_spec["agent"].items() if key != "tools"}

    def make(name, **changes):
        return make_run(
            name,
            code={"world.py": WORLD},
            agent={**agent, "environment": "World"},
            training=TRAINING,
            evaluation={"holdout": 0.2, "every_steps": 2},
            preflight={"cases": 2},
            **changes,
        )

    return make


def test_two_processes_train_one_model_and_go_on_exactly(two):
    whole = two("whole")
    assert start(whole).wait(200) == 0, (whole.path / "output.log").read_text()[-3000:]

    cases = cases_by_step(whole)
    assert {step: len(found) for step, found in cases.items()} == dict.fromkeys((1, 2, 3), 8)
    assert all(len(set(found)) == 2 for found in cases.values())  # a group in each process
    evaluated = {
        (r["phase"], r["case_id"])
        for r in events_of(whole, "rollout")
        if r["phase"] in ("before", "after")
    }
    (before,) = [e for e in events_of(whole, "evaluation") if e["name"] == "before"]
    assert {case for phase, case in evaluated if phase == "before"} == set(before["passed"])
    assert [e["step"] for e in events_of(whole, "progress")] == [1, 2, 3]
    assert [e["step"] for e in events_of(whole, "metrics")] == [1, 2, 3]
    assert [e["status"] for e in events_of(whole, "status")] == [
        *("preparing", "training", "evaluating"),
    ]
    assert len(events_of(whole, "preflight")) == 1
    for line in events_of(whole, "metrics"):  # of both processes: 8 rollouts
        step = [
            r
            for r in events_of(whole, "rollout")
            if (r["phase"], r["step"]) == ("train", line["step"])
        ]
        passed = [r["reward"] == 1 for r in step]
        assert line["values"]["pass_rate"] == pytest.approx(sum(passed) / 8)
        lengths = [len(r["roles"]) - r["roles"].count("p") for r in step]
        assert line["values"]["completions/mean_length"] == pytest.approx(sum(lengths) / 8)
    assert (whole.path / MANIFEST).is_file()
    states = {p.name for p in newest_complete((whole.path,)).glob("rng_state_*.pth")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}

    first = two("first")
    process = start(first)
    while not any(p["step"] for p in events_of(first, "progress")):
        assert process.poll() is None, (first.path / "output.log").read_text()[-3000:]
        time.sleep(0.05)
    (first.path / PAUSE).touch()
    assert process.wait(100) == 1
    assert "paused_by_user" in (first.path / FAILURE).read_text()
    second = two("second", previous=[first.path])
    assert start(second).wait(200) == 0
    assert {**cases_by_step(first), **cases_by_step(second)} == cases
    expected, got = weights(whole), weights(second)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_job_for_several_gpus_is_refused_where_there_are_none(two):
    run = two("gpus", resources={"gpus": 2})
    done = subprocess.run(
        [sys.executable, "-m", "worker.training", str(run.path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 1
    failure = (run.path / FAILURE).read_text()
    assert "gpu_failed" in failure
    assert "given 2 GPUs, and CUDA finds 0" in failure
