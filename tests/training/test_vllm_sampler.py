"""The sampler with an engine in a process of its own, here with an engine for the CPU."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from dressage.spec.status import Reason
from tests.conftest import ROOT, TINY_MODEL
from tests.training.conftest import events_of
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure
from worker.training.sampler import hand_over
from worker.training.sampler.engine_process import EngineOptions
from worker.training.sampler.hand_over import (
    EngineWeights,
    Place,
    Source,
    UnknownWeights,
    sources,
)
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Sampling, Turn, sample_all
from worker.training.sampler.vllm import VllmSampler
from worker.training.update.freshness import FreshnessGate

DOUBLE = "tests.training.engine_double"
PROMPTS = ["What is 17 * 23?", "Say something long.", "1 + 1"]


def options(tokenizer):
    return EngineOptions(
        model=str(TINY_MODEL),
        dtype="float32",
        end_ids=(tokenizer.eos_token_id,),
        max_model_len=256,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=1,
        max_num_seqs=64,
        seed=0,
    )


@pytest.fixture
def start(tokenizer):
    started = []

    def go(engine="HfEngine", **settings):
        started.append(VllmSampler(options(tokenizer), factory=f"{DOUBLE}:{engine}", **settings))
        return started[-1]

    yield go
    for sampler in started:
        sampler.close()
        assert not alive(sampler.pid)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def trained_model(*, lora=True, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    if not lora:
        return model
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def move(model, by=0.05):
    """As training does: every trained weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * by)


def turns(tokenizer, temperature=0.0, limit=12):
    return [
        Turn(tokenizer(text)["input_ids"], limit, Sampling(temperature), at)
        for at, text in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("lora", [True, False])
def test_the_engine_writes_what_the_trained_model_would(start, tokenizer, lora):
    model = trained_model(lora=lora)
    sampler = start()
    sampler.attach(sources(model))
    asked = turns(tokenizer)
    before = asyncio.run(sample_all(sampler, asked))
    assert all(set(one.versions) == {0} for one in before)
    move(model, 0.02 if not lora else 0.2)
    still = asyncio.run(sample_all(sampler, asked))  # until it is told
    assert [one.ids for one in still] == [one.ids for one in before]
    sampler.load_weights(7)
    after = asyncio.run(sample_all(sampler, asked))
    own = TransformersSampler(model, tokenizer, version=7).write(asked)
    assert [one.ids for one in after] == [one.ids for one in own]
    assert [one.ids for one in after] != [one.ids for one in before]
    for one, wanted in zip(after, own, strict=True):
        assert one.logps == pytest.approx(wanted.logps, abs=1e-3)
        assert one.versions == [7] * len(one.ids)


def test_an_adapter_of_some_layers_finds_its_rows_in_fused_matrices():
    """v_proj lies behind q_proj and k_proj, whether these have adapters or not."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["v_proj", "up_proj"], task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    move(peft)
    from tests.training.engine_double import HfEngine

    class Options:
        model, dtype, end_ids, max_model_len = str(TINY_MODEL), "float32", (1,), 256

    engine = HfEngine(Options)
    before = {name: value.clone() for name, value in engine.parameters().items()}
    EngineWeights(engine.parameters(), sources(peft)).write()
    attention = model.model.layers[1].self_attn
    behind = attention.q_proj.weight.shape[0] + attention.k_proj.weight.shape[0]
    name = "model.layers.1.self_attn.qkv_proj.weight"
    changed = engine.parameters()[name] != before[name]
    assert not changed[:behind].any()
    assert changed[behind:].any()
    merged = attention.v_proj.get_delta_weight("default") + attention.v_proj.base_layer.weight
    assert torch.allclose(engine.parameters()[name][behind:], merged, atol=1e-6)


def test_what_is_less_than_a_step_of_bfloat16_arrives_all_the_same():
    """To the nearest, nothing of it would: the base lies on the grid."""
    torch.manual_seed(0)
    base = (torch.randn(512, 256) * 0.02).bfloat16()
    down, up = torch.full((1, 256), 1e-3), torch.full((512, 1), 2e-2)  # 2e-5 everywhere
    engine = {"w": base.clone()}
    weights = EngineWeights(engine, [Source((Place("w", 0),), base, down, up, 1.0)])
    weights.write()
    nearest = (base.float() + 2e-5).bfloat16()
    assert float((nearest - base).float().mean()) < 0.5 * 2e-5
    moved = float((engine["w"].float() - base.float()).mean())
    assert moved == pytest.approx(2e-5, rel=0.1)
    first = engine["w"].clone()
    weights.write()  # the same chances each time: nothing flickers
    assert torch.equal(engine["w"], first)
    up.zero_()
    weights.write()
    assert torch.equal(engine["w"], base)


def test_weights_without_a_place_are_named():
    model = trained_model()
    with pytest.raises(UnknownWeights, match=r"model.layers.0.self_attn.q_proj.weight, .* …"):
        EngineWeights({"other.weight": torch.zeros(2, 2)}, sources(model))


def test_new_weights_come_in_between_two_tokens_and_every_token_says_its_version(start, tokenizer):
    sampler = start()
    sampler.attach(sources(trained_model()))
    (turn, *_) = turns(tokenizer, temperature=1.0, limit=150)
    turn = Turn(turn.prompt, 150, Sampling(5.0), 3)  # so hot that it hardly ends by itself

    async def both():
        writing = asyncio.create_task(sampler.sample(turn))
        for version in (1, 2):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(sampler.load_weights, version)
        return await writing

    versions = asyncio.run(both()).versions
    assert versions == sorted(versions)
    assert {0, 1} <= set(versions)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("Dying", r"its process has ended \(exit code 9\)"),
        ("Raising", "ValueError: the kernel said no"),
        ("Hanging", "it has said nothing for"),
    ],
)
def test_an_engine_that_fails_is_a_failure_with_a_reason_and_leaves_nothing(
    start, tokenizer, engine, message
):
    sampler = start(engine, silent_seconds=2.0)
    began = time.monotonic()
    with pytest.raises(RunFailure, match=message) as caught:
        asyncio.run(sample_all(sampler, turns(tokenizer)))
    assert caught.value.reason is Reason.SAMPLER_FAILED
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 10
    while alive(sampler.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(sampler.pid)
    with pytest.raises(RunFailure, match=message):  # whoever asks later is told the same
        sampler.load_weights(1)


HOLDER = """
import sys, time
from tests.training.engine_double import HfEngine
from worker.training.sampler.engine_process import EngineOptions
from worker.training.sampler.vllm import VllmSampler

if __name__ == "__main__":
    options = EngineOptions(sys.argv[1], "float32", (1,), 256, 0.3, 1, 64, 0)
    sampler = VllmSampler(options, factory="tests.training.engine_double:HfEngine")
    print(sampler.pid, flush=True)
    time.sleep(600)
"""


def test_the_engine_ends_with_the_trainer_however_that_ends(tmp_path):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    holder = subprocess.Popen(
        [sys.executable, script, TINY_MODEL],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    engine = int(holder.stdout.readline())
    assert alive(engine)
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 10
    while alive(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(engine)


def test_an_engine_that_is_killed_while_it_hands_over_is_noticed(start):
    sampler = start()
    sampler.attach(sources(trained_model()))
    os.kill(sampler.pid, signal.SIGKILL)
    with pytest.raises(RunFailure, match="its process has ended"):
        sampler.load_weights(1)


def test_an_engine_that_does_not_load_says_why(tokenizer):
    with pytest.raises(RunFailure, match="RuntimeError: no memory left for") as caught:
        VllmSampler(options(tokenizer), factory=f"{DOUBLE}:NotLoading")
    assert caught.value.reason is Reason.SAMPLER_FAILED


def checked(gate, sampler):
    return gate.check(gate.trained(), asyncio.run(sampler.score(gate.ids)))


def gate_of(model, tokenizer):
    return FreshnessGate(model, tokenizer("What is 17 * 23? " * 4)["input_ids"], dtype="float32")


def test_the_gate_passes_what_is_fresh(start, tokenizer):
    model, sampler = trained_model(), start()
    sampler.attach(sources(model))
    gate = gate_of(model, tokenizer)
    for version in range(3):
        sampler.load_weights(version)
        assert checked(gate, sampler).largest < 1e-3
        move(model)


@pytest.mark.parametrize("by", [0.05, 0.3])
def test_a_hand_over_that_is_skipped_is_stale(start, tokenizer, by):
    model, sampler = trained_model(), start("Skipping")
    sampler.attach(sources(model))
    gate = gate_of(model, tokenizer)
    sampler.load_weights(0)
    checked(gate, sampler)
    move(model, by)
    sampler.load_weights(1)
    with pytest.raises(RunFailure, match="not written by the weights that are trained") as caught:
        checked(gate, sampler)
    assert caught.value.reason is Reason.SAMPLER_STALE


def test_an_adapter_under_a_wrong_prefix_is_stale(start, tokenizer, monkeypatch):
    """Layer 0's weights in the place of layer 1's."""
    places = hand_over._places

    def wrong(name, modules):
        swapped = name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.")
        return places(swapped.replace("layers.X.", "layers.1."), modules)

    monkeypatch.setattr(hand_over, "_places", wrong)
    model, sampler = trained_model(), start()
    given = sources(model)
    sampler.attach(given)
    gate = gate_of(model, tokenizer)
    sampler.load_weights(0)  # the base's own layers are swapped already
    with pytest.raises(RunFailure) as caught:
        checked(gate, sampler)
    assert caught.value.reason is Reason.SAMPLER_STALE


VLLM = {"vllm": {"gpu_memory_utilization": 0.2}, "learning_rate": 0.01}


@pytest.fixture
def double(monkeypatch):
    def use(engine="HfEngine"):
        monkeypatch.setattr("worker.training.pipeline.build.ENGINE", f"{DOUBLE}:{engine}")

    use()
    return use


def values(run, name):
    return [event["values"].get(name) for event in events_of(run, "metrics")]


def test_a_job_trains_on_what_an_engine_writes(make_run, double):
    run = make_run(
        training={**VLLM, "max_steps": 3, "max_completion_length": 30, "echo": {"coeff": 0.05}},
        preflight={"cases": 2},
    )
    run_job(run)
    for name in ("sampling/sampling_logp_difference/mean", "sampling/canary_gap/mean"):
        assert all(0 <= value < 1e-3 for value in values(run, name)), name
    assert values(run, "sampling/clipped_share") == [0.0] * 3
    ratios = values(run, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * 3, abs=1e-3)
    assert all(value is not None for value in values(run, "time/hand_over"))
    evaluations = {event["name"]: event for event in events_of(run, "evaluation")}
    assert set(evaluations) == {"before", "after"}


def test_whole_weights_are_proved_as_they_are_stored(make_run, double):
    run = make_run(
        training={
            **VLLM,
            "lora": None,
            "learning_rate": 1e-3,
            "dtype": "bfloat16",
            "max_steps": 2,
            "max_completion_length": 30,
        },
    )
    run_job(run)
    # The engine has bfloat16 weights, the trainer float32 ones.
    assert all(value < 0.05 for value in values(run, "sampling/canary_gap/mean"))
    assert {event["name"] for event in events_of(run, "evaluation")} == {"before", "after"}


def test_a_stale_sampler_ends_the_job_before_it_trains_on_anything_stale(make_run, double):
    double("Skipping")
    run = make_run(training={**VLLM, "max_steps": 4, "learning_rate": 0.05})
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.SAMPLER_STALE
    steps = [event["step"] for event in events_of(run, "progress")]
    assert steps == [1]


def test_a_job_trains_on_rollouts_that_are_some_versions_old(make_run, double):
    run = make_run(
        training={**VLLM, "max_steps": 4, "max_staleness": 2, "max_completion_length": 40},
        preflight={"cases": 2},
        evaluation={"holdout": 0.1, "every_steps": 2},
    )
    run_job(run)
    ages = values(run, "rollouts/age/max")
    assert ages[0] == 0
    assert 0 < max(ages) <= 2
    assert values(run, "rollouts/dropped") == [0.0] * 4
    trained = [r for r in events_of(run, "rollout") if r["phase"] == "train"]
    assert len(trained) == 4 * 8
    assert len({(r["case_id"], r["index"]) for r in trained}) == 4 * 8  # each case once
    assert max(values(run, "sampling/canary_gap/mean")) < 1e-3
    assert [e["name"] for e in events_of(run, "evaluation")] == [
        *("before", "step-2", "step-4", "after"),
    ]


def test_without_vllm_the_job_says_what_it_needs(make_run):
    run = make_run(training=VLLM)
    with pytest.raises(RunFailure, match="needs the package vllm on the worker") as caught:
        run_job(run)
    assert caught.value.reason is Reason.MISSING_DEPENDENCY
