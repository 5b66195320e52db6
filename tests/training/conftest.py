import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dressage.authoring import Suite
from dressage.spec.job import JobSpec
from tests.conftest import TINY_MODEL
from worker.training.export.gguf import convert
from worker.wire.run_dir import EVENTS, SPEC, SUITE, RunDirectory, RunSpec


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="session")
def base_gguf(tmp_path_factory):
    """The tiny model as llama.cpp and Ollama take it."""
    path = tmp_path_factory.mktemp("gguf") / "base.gguf"
    convert(TINY_MODEL, path, "f16", {})
    return path


@pytest.fixture
def make_run(tmp_path, arithmetic, job_spec):
    """Lay out a run directory: `make_run("name", training={…}, code={…}, previous=[…])`."""

    def make(name="run", *, training=None, code=None, previous=(), cases=None, **changes):
        spec = {**job_spec, **changes}
        spec["training"] = {**job_spec["training"], **(training or {})}
        suite = Suite(
            cases or arithmetic.cases[:60],
            {**arithmetic.code, **{k: v.encode() for k, v in (code or {}).items()}},
        )
        folder = tmp_path / name
        folder.mkdir()
        run_spec = RunSpec(
            job=JobSpec.model_validate(spec), previous=tuple(str(p) for p in previous)
        )
        (folder / SPEC).write_text(run_spec.model_dump_json())
        (folder / SUITE).write_bytes(suite.to_archive())
        return RunDirectory(folder)

    return make


def events_of(run, type_=None):
    lines = (run.path / EVENTS).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["data"] for event in events if type_ in (None, event["type"])]


def small_model(family="qwen3", **options):
    """An untrained model of a family, with the same weights each time."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **options}))
