"""What docs/exports.md says of vLLM: the adapter on its base, and the merged model.

Needs a CUDA device and vLLM, and none of the service: `pytest tests/gpu`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dressage.authoring import Suite
from dressage.spec.job import JobSpec
from tests.training.adapters import make_adapter
from worker.training.evaluate import split
from worker.training.export.answers import ServedAnswer, with_object_arguments
from worker.training.export.merge import merge
from worker.training.export.parity import ParityCheck
from worker.training.export.served import agent_template
from worker.training.process.user_code import user_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = ROOT / "examples" / "tiny_agent" / "model"
ARITHMETIC = ROOT / "examples" / "arithmetic"
NAME, MERGED = "calc-agent", "calc-agent-merged"
CASES = 16


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter that changes the model a little, as training does."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    make_adapter(folder, BASE)
    return folder


@pytest.fixture(scope="module")
def check(adapter):
    job = json.loads((ARITHMETIC / "job.json").read_text())
    job["agent"]["model"] = str(BASE)
    suite = Suite.from_path(ARITHMETIC)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), adapter
    )
    spec = JobSpec.model_validate(job)
    _, held_out = split(suite.cases, spec.evaluation)
    with user_code(suite, network=False, size=2) as pool:
        tokenizer = AutoTokenizer.from_pretrained(adapter)
        tools = spec.agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments)
        template = agent_template(spec.agent, tokenizer, tools)
        yield ParityCheck(spec, model, template, pool, held_out[:CASES])


class Vllm:
    """`vllm serve …` as its documentation starts it, and what it answers."""

    def __init__(self, model, *options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        options = [*options, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        limits = ["--max-model-len", "512", "--gpu-memory-utilization", "0.3", "--enforce-eager"]
        self._process = subprocess.Popen(
            [*command, *options, *limits, "--dtype", "float16", "--port", str(port)],
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        )
        self._http = httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120)

    def __enter__(self):
        deadline = time.monotonic() + 240
        while True:
            assert self._process.poll() is None, "vLLM ended"
            assert time.monotonic() < deadline, "vLLM did not come up"
            try:
                if self._http.get("/models").status_code == 200:
                    return self
            except httpx2.TransportError:
                time.sleep(1)

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(60)

    def chat(self, name):
        def ask(messages, tools):
            request = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 64}
            request |= {"tools": tools} if tools else {}
            answer = self._http.post("/chat/completions", json=request)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            return ServedAnswer(
                message=with_object_arguments(choice["message"]),
                prompt_tokens=answer.json()["usage"]["prompt_tokens"],
                cut_off=choice["finish_reason"] == "length",
            )

        return ask

    def next_token(self, name):
        def ask(prefix):
            request = {"model": name, "prompt": prefix, "max_tokens": 1, "temperature": 0}
            request |= {"logprobs": 20, "return_tokens_as_token_ids": True}
            answer = self._http.post("/completions", json=request)
            assert answer.status_code == 200, answer.text
            (listed,) = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
            return {int(token.split(":")[1]): value for token, value in listed.items()}

        return ask


def report(check, server, name):
    found = check.report(name, server.chat(name), server.next_token(name))
    print(found.model_dump_json())
    return found


def test_the_adapter_on_its_base_is_what_was_trained_and_the_base_alone_is_not(check, adapter):
    lora = ("--enable-lora", "--lora-modules", f"{NAME}={adapter}", "--max-lora-rank", "16")
    with Vllm(BASE, *lora, "--served-model-name", "base") as server:
        served = report(check, server, NAME)
        assert served.problems == ()
        assert served.same_prompt == 1.0
        assert served.same_answer >= 0.8
        assert served.kl < served.kl_base / 10
        base = report(check, server, "base")
        assert "nearer_to_base" in base.problems


def test_the_merged_model_is_what_was_trained(check, adapter, tmp_path):
    merge(adapter, str(BASE), tmp_path / "merged", ["3 + 4"], trained_in_4bit=False)
    with Vllm(tmp_path / "merged", "--served-model-name", MERGED) as server:
        served = report(check, server, MERGED)
        assert served.problems == ()
        assert served.same_prompt == 1.0
        assert served.top_token >= 0.95
