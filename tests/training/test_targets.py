"""What of a model is trained: adapters where they are asked for, and weights that move."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from dressage.spec.status import Reason
from dressage.spec.training import LoraSpec, TrainingSpec
from tests.training.conftest import events_of, small_model
from worker.training.pipeline.pulse import Pulse
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Sampling, Turn
from worker.training.update.config import lora_config, require_targets
from worker.training.update.moved import MovedWeights
from worker.wire.run_dir import MANIFEST, RunDirectory


def spec(*targets):
    return TrainingSpec(lora=LoraSpec(target_modules=targets))


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (("q_proj", "v_porj"), "the model has no layer v_porj; its linear layers are down_proj"),
        (("gate_up_proj",), "the model has no layer gate_up_proj"),
        (("lm_head",), "lm_head is one with the embeddings"),
    ],
)
def test_every_layer_that_is_named_must_be_there(targets, sentence):
    with pytest.raises(RunFailure) as caught:
        require_targets(spec(*targets), small_model(tie_word_embeddings=True))
    assert caught.value.reason is Reason.MODEL_UNSUPPORTED
    assert sentence in caught.value.message


def test_layers_that_are_there_are_taken():
    require_targets(spec("q_proj", "layers.0.self_attn.v_proj"), small_model())
    require_targets(spec("lm_head"), small_model(tie_word_embeddings=False))
    require_targets(TrainingSpec(lora=LoraSpec()), small_model())


def test_the_router_of_experts_has_no_adapter():
    model = small_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    adapted = get_peft_model(model, lora_config(TrainingSpec(lora=LoraSpec()), model))
    trained = {
        n.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1]
        for n, _ in adapted.named_parameters()
        if ".lora_" in n
    }
    assert {"q_proj", "v_proj"} <= trained
    assert not {"gate", "router"} & trained


def test_the_share_of_weights_that_moved_by_hand():
    model = torch.nn.Linear(10, 10)
    moved = MovedWeights(model)
    assert moved.share(model) == 0
    with torch.no_grad():
        model.weight[:5] += 1
    assert moved.share(model) == 50 / 110


def test_whole_weights_of_a_bfloat16_model_move_and_are_stored_in_their_type(make_run):
    run = make_run(training={"lora": None, "dtype": "bfloat16", "learning_rate": 1e-5})
    run_job(run)
    result = json.loads((run.path / MANIFEST).read_text())["result"]
    assert result["moved_weights"] > 0.9
    assert [m["values"]["weights/moved_share"] > 0 for m in events_of(run, "metrics")][-1]
    stored = AutoModelForCausalLM.from_pretrained(run.path / "final", dtype="auto")
    assert stored.dtype is torch.bfloat16
    assert result["parameters"]["all"] == result["parameters"]["trained"]


def test_of_many_rollouts_the_first_and_last_of_a_group_are_stored_whole(make_run):
    run = make_run(training={"keep_rollouts": 0, "max_steps": 1}, evaluation={"holdout": 0})
    run_job(run)
    rollouts = events_of(run, "rollout")
    assert [r["index"] for r in rollouts if r["whole"]] == [0, 3, 0, 3]
    bare = [r for r in rollouts if not r["whole"]]
    assert len(bare) == 4
    assert all((r["messages"], r["token_ids"], r["roles"]) == ([], [], "") for r in bare)
    assert all(r["reward"] is not None and r["verdicts"] for r in bare)


def test_signs_of_life_come_between_the_turns_of_a_long_step(tmp_path, monkeypatch):
    monkeypatch.setattr("worker.training.pipeline.pulse.EVERY_SECONDS", 0.0)
    run = RunDirectory(tmp_path)
    pulse = Pulse(run)
    pulse.beat()
    pulse.beat()
    first, second = (event["message"] for event in events_of(run, "alive"))
    assert (first, second) == (
        "1 turns of rollouts are played",
        "2 turns of rollouts are played",
    )


def test_rows_end_at_their_own_limits_and_never_beyond_what_the_model_holds():
    """GPT-2 has learned positions: one beyond the last is an error, not a worse answer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=60,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = SimpleNamespace(
        pad_token_id=0,
        eos_token_id=2,
        added_tokens_decoder={},
        apply_chat_template=lambda *_, **__: "",
        __call__=None,
    )
    sampler = TransformersSampler(model, tokenizer)
    prompts = [[5] * 30, [6] * 4, [7] * 20]
    limits = [2, 28, 12]
    for seed in range(5):
        turns = [
            Turn(prompt, limit, Sampling(1.0), 10 * seed + at)
            for at, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        written = sampler.write(turns)
        assert all(0 < len(one.ids) <= turn.limit for one, turn in zip(written, turns, strict=True))
        # Whoever is written for together, a turn's draw is its own.
        alone = [sampler.write([turn])[0].ids for turn in reversed(turns)][::-1]
        few = TransformersSampler(model, tokenizer, rows=1).write(turns)
        assert [one.ids for one in written] == alone == [one.ids for one in few]
