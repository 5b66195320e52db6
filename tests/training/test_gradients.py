"""What must not change a gradient: splitting, padding, and rollouts that are masked."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dressage.spec.event import TokenRole
from tests.training.conftest import events_of
from worker.training.pipeline.run import run_job
from worker.training.update.trainer import JobTrainer


@pytest.fixture(scope="module")
def captured(tmp_path_factory, arithmetic):
    """A trainer in the middle of its first step: with ECHO, full weights, 8 rollouts."""
    from dressage.authoring import Suite
    from dressage.spec.job import JobSpec
    from tests.conftest import TINY_MODEL
    from worker.wire.run_dir import SPEC, SUITE, RunDirectory, RunSpec

    folder = tmp_path_factory.mktemp("captured")
    job = {
        "name": "captured",
        "agent": {
            "model": str(TINY_MODEL),
            "instructions": "Solve the exercise. Use the calculator.",
            "tools": ["calculate"],
        },
        "suite": "arithmetic",
        "rewards": [{"measure": "correct_answer"}],
        "training": {
            "max_steps": 1,
            "batch_size": 8,
            "gradient_accumulation": 1,
            "num_generations": 4,
            "max_completion_length": 60,
            "temperature": 1.0,
            "dtype": "float32",
            "mask_truncated_completions": False,
            "echo": {"coeff": 0.5},
        },
        "evaluation": {"holdout": 0},
        "preflight": {"cases": 0},
        "resources": {"gpus": 0},
    }
    (folder / SPEC).write_text(RunSpec(job=JobSpec.model_validate(job)).model_dump_json())
    (folder / SUITE).write_bytes(Suite(arithmetic.cases[:20], arithmetic.code).to_archive())
    kept = {}
    original = JobTrainer._compute_loss

    def keep(self, model, inputs):
        kept.setdefault("trainer", self)
        kept.setdefault("inputs", copy.deepcopy(inputs))
        kept.setdefault("weights", copy.deepcopy(model.state_dict()))
        return original(self, model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobTrainer, "_compute_loss", keep)
        run_job(RunDirectory(folder))
    trainer, inputs = kept["trainer"], kept["inputs"]
    trainer.model.load_state_dict(kept["weights"])
    advantages = torch.linspace(-1, 1, 8)  # whatever was rewarded: every rollout teaches here
    return trainer, {**inputs, "advantages": advantages}


def gradient(trainer, batches):
    """The gradient of one optimizer step over these micro-batches, flattened."""
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.args.steps_per_generation = len(batches)
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()
    parts = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(parts)


def rows(inputs, chosen):
    """The micro-batch of these rollouts; totals of the whole batch stay."""
    return {
        name: value[chosen]
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == 8
        else value
        for name, value in inputs.items()
    }


def close(a, b):
    return torch.allclose(a, b, rtol=1e-3, atol=2e-5 * float(a.abs().max()))


def test_eight_micro_batches_of_one_are_one_of_eight(captured):
    trainer, inputs = captured
    whole = gradient(trainer, [inputs])
    assert float(whole.norm()) > 0
    assert close(whole, gradient(trainer, [rows(inputs, [at]) for at in range(8)]))
    assert close(whole, gradient(trainer, [rows(inputs, [0, 1, 2, 3]), rows(inputs, [4, 5, 6, 7])]))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(left=st.integers(0, 9), right=st.integers(0, 9))
def test_padding_changes_nothing(captured, left, right):
    trainer, inputs = captured
    pad = trainer.processing_class.pad_token_id
    longer = dict(inputs)
    for name, fill in (("prompt_ids", pad), ("prompt_mask", 0)):
        longer[name] = torch.nn.functional.pad(inputs[name], (left, 0), value=fill)
    for name, fill in (
        ("completion_ids", pad),
        ("completion_mask", 0),
        ("tool_mask", 1),
        ("echo_weights", 0),
    ):
        if name in inputs:
            longer[name] = torch.nn.functional.pad(inputs[name], (0, right), value=fill)
    assert close(gradient(trainer, [inputs]), gradient(trainer, [longer]))


def test_a_masked_rollout_adds_nothing(captured):
    """With its actions out of the mask and nothing observed, it may say anything."""
    trainer, inputs = captured
    masked = {**inputs, "completion_mask": inputs["completion_mask"].clone()}
    masked["completion_mask"][3] = 0
    masked["echo_weights"] = inputs["echo_weights"].clone()
    masked["echo_weights"][3] = 0
    other = {**masked, "completion_ids": masked["completion_ids"].clone()}
    other["completion_ids"][3] = 7
    other["advantages"] = masked["advantages"].clone()
    other["advantages"][3] = 5.0
    assert close(gradient(trainer, [masked]), gradient(trainer, [other]))


def test_truncated_rollouts_teach_nothing_when_masked(make_run):
    """Neither the policy nor ECHO: TRL takes their tokens out of the attention."""
    from tests.training.test_pipeline import weights

    run = make_run(
        training={
            "max_completion_length": 6,
            "mask_truncated_completions": True,
            "max_steps": 1,
            "echo": {"coeff": 1.0},
            "scale_rewards": "none",
        }
    )
    run_job(run)
    rollouts = [r for r in events_of(run, "rollout") if r["phase"] == "train"]
    assert {r["stop_reason"] for r in rollouts} == {"max_completion_length"}
    trained = weights(run)
    assert all((value == 0).all() for name, value in trained.items() if "lora_B" in name)


def test_every_token_has_a_role_and_a_log_probability(captured):
    trainer, inputs = captured
    assert inputs["echo_weights"].sum() > 0
    rollouts = {tuple(s.rollout.completion_ids): s.rollout for s in trainer._batch.scored}
    for row in range(8):  # TRL shuffles them after they were scored
        count = int(inputs["completion_mask"][row].sum())
        rollout = rollouts[tuple(inputs["completion_ids"][row][:count].tolist())]
        assert len(rollout.roles) == len(rollout.origins) == count
        actions = [role is TokenRole.ACTION for role in rollout.roles]
        observed = [float(role is TokenRole.OBSERVATION) for role in rollout.roles]
        assert inputs["tool_mask"][row][:count].bool().tolist() == actions
        assert inputs["echo_weights"][row][:count].tolist() == observed
    trainer._compute_loss(trainer.model, inputs)
    assert trainer._logps.shape == inputs["completion_ids"].shape
