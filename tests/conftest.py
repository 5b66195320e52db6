"""What all worlds share. Each world imports its own things, so that none needs another one's."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["tests.servers"]

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TINY_MODEL = ROOT / "examples" / "tiny_agent" / "model"

# The worlds, by folder: what its tests need. `contracts` says it for each file.
WORLDS = {
    **dict.fromkeys(("spec", "authoring", "measuring", "client", "local", "sandbox"), "pure"),
    **dict.fromkeys(("app", "cli", "migrations"), "app"),
    **dict.fromkeys(("training", "worker"), "training"),
    **dict.fromkeys(("docs", "end_to_end", "faults"), "service"),
    "gpu": "gpu",
}

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_configure():
    try:
        import hypothesis
    except ImportError:  # on a GPU machine
        return
    # How long an example takes says nothing on a busy machine.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in WORLDS:
            item.add_marker(WORLDS[folder])


@pytest.fixture(scope="session")
def arithmetic():
    from dressage.authoring import Suite

    return Suite.from_path(ARITHMETIC)


@pytest.fixture
def job_spec():
    """A small job on the tiny model that every check accepts."""
    return {
        "name": "small",
        "agent": {
            "model": str(TINY_MODEL),
            "instructions": "Solve the exercise. Use the calculator.",
            "tools": ["calculate"],
        },
        "suite": "arithmetic",
        "rewards": [{"measure": "correct_answer"}],
        "training": {
            "max_steps": 2,
            "batch_size": 8,
            "gradient_accumulation": 1,
            "num_generations": 4,
            "max_completion_length": 60,
            "max_tool_iterations": 2,
            "temperature": 1.0,
            "dtype": "float32",
            "lora": {"r": 4, "alpha": 8, "dropout": 0.0},
            "logging_steps": 1,
        },
        "evaluation": {"holdout": 0.02},
        "preflight": {"cases": 0},
        "resources": {"gpus": 0},
    }
