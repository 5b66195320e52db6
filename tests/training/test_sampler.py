"""Rollouts are drawn as the job says, and in no other way."""

import json
import shutil

import pytest

from tests.conftest import TINY_MODEL
from worker.training.model import load_model, load_tokenizer
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Sampling, Turn

PROMPTS = ["What is 17 * 23?", "Say something long.", "1 + 1"]


def drawn(folder, temperature):
    tokenizer = load_tokenizer(str(folder))
    model = load_model(str(folder), dtype="float32", use_cpu=True)
    sampler = TransformersSampler(model, tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return sampler.write([Turn(ids, 24, Sampling(temperature), 3) for ids in prompts])


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(100, 400))},
        {"min_p": 0.9, "top_k": 1, "top_p": 0.01, "temperature": 0.01, "do_sample": True},
        {"min_new_tokens": 20, "max_length": 5},
        {"num_beams": 3},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_model_prefers_changes_nothing_and_is_said(
    tmp_path, caplog, settings, temperature
):
    expected = drawn(TINY_MODEL, temperature)
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, **settings}))
    assert drawn(tmp_path / "model", temperature) == expected
    name = next(iter(settings))
    assert any(name in line and "as the job says alone" in line for line in caplog.messages)
