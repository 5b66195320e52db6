"""What must not change a gradient: splitting, padding, what is left out. And TRL's own gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer

from dressage.spec.event import TokenRole
from tests.training.conftest import events_of
from worker.training.pipeline.run import run_job
from worker.training.update.micro_batches import compiled_widths, micro_batches
from worker.training.update.policy import PolicyUpdate
from worker.training.update.policy_loss import MOST
from worker.training.update.rows import action_mask, policy_shares
from worker.training.update.trainer import JobTrainer

TEMPERATURE, HORIZON = 0.7, 60


@pytest.fixture(scope="module")
def captured(tmp_path_factory, arithmetic):
    """A trainer before its first step, and that step's rollouts and rows: full weights, ECHO."""
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
            "max_completion_length": HORIZON,
            "temperature": TEMPERATURE,
            "beta": 0.1,
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
    learned, update = JobTrainer._learned, PolicyUpdate.__call__

    def keep_batch(self, batch):
        kept.update(trainer=self, rollouts=batch.rollouts)
        return learned(self, batch)

    def keep_rows(self, model, rows, **options):
        kept.update(rows=rows, weights=copy.deepcopy(model.state_dict()))
        return update(self, model, rows, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobTrainer, "_learned", keep_batch)
        patch.setattr(PolicyUpdate, "__call__", keep_rows)
        run_job(RunDirectory(folder))
    trainer = kept["trainer"]
    trainer.model.load_state_dict(kept["weights"])
    # Whatever was rewarded: every rollout but one teaches here.
    advantages = [-1.0, -0.6, 0.0, 0.2, 0.5, 0.9, 1.3, -0.4]
    rows = [replace(row, advantage=a) for row, a in zip(kept["rows"], advantages, strict=True)]
    return trainer, kept["rollouts"], rows


def gradient(trainer, rows, *, coeff=0.0, **options):
    """The gradient of one optimizer step over these rows, flattened; and what was seen."""
    options = {"tokens": 10_000, "beta": 0.0, **options}
    update = PolicyUpdate(
        trainer.unwrapped,
        trainer.accelerator,
        replace(trainer._update.options, **options),
        trainer.ref_model,
    )
    trainer.model.zero_grad()
    trainer.model.train()
    figures = update(trainer.model, rows, coeff=coeff)
    return flat(trainer), figures


def flat(trainer):
    return torch.cat(
        [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    ).clone()


def close(a, b):
    return torch.allclose(a, b, rtol=1e-3, atol=2e-5 * float(a.abs().max()))


def test_however_rollouts_are_put_together_the_gradient_is_the_same(captured):
    trainer, _, rows = captured
    whole, seen = gradient(trainer, rows, coeff=0.5)
    assert seen.passes == 1
    assert float(whole.norm()) > 0
    alone, seen = gradient(trainer, rows, coeff=0.5, tokens=1)
    assert (seen.passes, seen.padding, seen.left_out) == (7, 0, 1)
    assert close(whole, alone)
    some, seen = gradient(trainer, list(reversed(rows)), coeff=0.5, tokens=400)
    assert 1 < seen.passes < 8
    assert close(whole, some)
    padded, seen = gradient(trainer, rows, coeff=0.5, tokens=600, widths=compiled_widths(300))
    assert seen.padding > 200
    assert close(whole, padded)


def test_rollouts_that_cannot_teach_are_left_out_and_change_nothing(captured):
    trainer, _, rows = captured
    whole, seen = gradient(trainer, rows)
    assert (seen.rows, seen.left_out) == (8, 1)  # the one without advantage
    _, seen = gradient(trainer, rows, coeff=0.5)
    assert seen.left_out == sum(row.advantage == 0 and not row.observes for row in rows)
    _, seen = gradient(trainer, rows, beta=0.1)
    assert seen.left_out == 0  # all are drawn to the reference
    masked = [replace(row, policy=[0.0] * len(row.policy)) if at == 3 else row
              for at, row in enumerate(rows)]  # fmt: skip
    other = [replace(row, ids=[7] * len(row.ids)) if at == 3 else row
             for at, row in enumerate(masked)]  # fmt: skip
    assert torch.equal(gradient(trainer, masked)[0], gradient(trainer, other)[0])
    assert not close(whole, gradient(trainer, masked)[0])


def test_without_any_that_teaches_every_gradient_is_there_and_zero(captured):
    trainer, _, rows = captured
    nothing, seen = gradient(trainer, [replace(row, advantage=0.0) for row in rows])
    assert seen.left_out == 8
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert nothing.numel() == trained
    assert (nothing == 0).all()
    masked = [replace(row, policy=[0.0] * len(row.policy)) for row in rows]
    assert (gradient(trainer, masked)[0] == 0).all()


def trl_inputs(trainer, rows, rollouts):
    """The same batch as TRL lays it out: prompts padded on the left, completions on the right."""
    pad = trainer.processing_class.pad_token_id
    prompts, completions, masks, tools = [], [], [], []
    for row, rollout in zip(rows, rollouts, strict=True):
        prompts.append(row.ids[: row.start])
        completions.append(row.ids[row.start :])
        masks.append([1] * len(completions[-1]))
        tools.append([int(role is TokenRole.ACTION) for role in rollout.roles])
    widest = max(map(len, prompts))
    longest = max(map(len, completions))

    def right(lists, fill):
        return torch.tensor([each + [fill] * (longest - len(each)) for each in lists])

    tool_mask = right(tools, 1)
    completion_mask = right(masks, 0)
    return {
        "prompt_ids": torch.tensor([[pad] * (widest - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": right(completions, pad),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
    }


def trl_gradient(trainer, inputs, *, loss_type, beta, corrected):
    own = (trainer.loss_type, trainer.beta, trainer.use_vllm)
    trainer.loss_type, trainer.beta, trainer.use_vllm = loss_type, beta, corrected
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    trainer.model.train()
    try:
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        loss.backward()
    finally:
        trainer.loss_type, trainer.beta, trainer.use_vllm = own
    return flat(trainer), float(loss)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradient_are_those_of_trl(captured, loss_type, beta, corrected):
    trainer, rollouts, rows = captured
    assert trainer.vllm_importance_sampling_clip_max == MOST
    inputs = trl_inputs(trainer, rows, rollouts)
    with torch.no_grad():  # another reference, and another sampler, than the model itself
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.01)
        logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
        reference, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            trainer.ref_model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
    drift = torch.linspace(-2, 1, logps.shape[1]).expand_as(logps)
    inputs |= {
        "ref_per_token_logps": reference,
        "old_per_token_logps": logps,
        "importance_sampling_ratio": torch.exp(-drift).clamp(max=MOST),
    }
    masks = [action_mask(rollout, mask_truncated=False) for rollout in rollouts]
    shares = policy_shares(masks, loss_type, horizon=HORIZON, tokens_of_all=sum(map(sum, masks)))
    sampled = [
        replace(row, policy=share, logps=(logps + drift)[at, : len(share)].tolist())
        for at, (row, share) in enumerate(zip(rows, shares, strict=True))
    ]
    got, seen = gradient(trainer, sampled, beta=beta, corrected=corrected, tokens=500)
    wanted, loss = trl_gradient(
        trainer, inputs, loss_type=loss_type, beta=beta, corrected=corrected
    )
    assert seen.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert close(wanted, got)
    if corrected:
        clipped = (inputs["importance_sampling_ratio"] == MOST)[:, :]
        mask = inputs["tool_mask"].bool() & inputs["completion_mask"].bool()
        kept = torch.tensor([r.moves_policy(to_reference=beta > 0) for r in sampled])[:, None]
        assert seen.clipped == int((clipped & mask & kept).sum()) > 0


def test_echo_adds_the_cross_entropy_at_temperature_one(captured):
    """Against logits of whole rollouts; the policy's part is at the sampling temperature."""
    trainer, _, rows = captured
    both, seen = gradient(trainer, rows, coeff=0.5, tokens=500)
    policy, _ = gradient(trainer, rows)
    trainer.model.zero_grad()
    total = 0.0
    for row in rows:
        logits = trainer.model(input_ids=torch.tensor([row.ids])).logits[0, row.start - 1 : -1]
        logps = torch.log_softmax(logits, dim=-1)
        said = logps.gather(1, torch.tensor(row.ids[row.start :])[:, None])[:, 0]
        total = total - (said * torch.tensor(row.echo)).sum()
    total.backward()
    assert seen.echo_loss == pytest.approx(0.5 * float(total), rel=1e-4)
    assert sum(map(sum, (row.echo for row in rows))) == pytest.approx(1.0)  # a mean over tokens
    assert close(both, policy + 0.5 * flat(trainer))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 500), max_size=40),
    tokens=st.integers(1, 3000),
    compiled=st.booleans(),
)
def test_every_row_is_in_one_micro_batch_that_has_room_for_it(lengths, tokens, compiled):
    widths = compiled_widths(500) if compiled else ()
    found = micro_batches(lengths, tokens, widths)
    assert sorted(at for micro in found for at in micro.rows) == list(range(len(lengths)))
    for micro in found:
        assert all(lengths[at] <= micro.width for at in micro.rows)
        assert len(micro.rows) <= micro.height
        assert micro.height == 1 or micro.height * micro.width <= tokens
        if compiled:
            assert micro.width in widths
            assert micro.height == max(1, tokens // micro.width)
        else:
            assert micro.width == max(lengths[at] for at in micro.rows)


def test_truncated_rollouts_teach_nothing_when_masked(make_run):
    """Neither the policy nor ECHO."""
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


def test_every_token_has_a_role_and_a_share(captured):
    _, rollouts, rows = captured
    assert any(row.observes for row in rows)
    for row, rollout in zip(rows, rollouts, strict=True):
        assert row.ids == rollout.prompt_ids + rollout.completion_ids
        roles = rollout.roles
        assert len(roles) == len(rollout.origins) == len(row.policy) == len(row.echo)
        assert [share > 0 for share in row.policy] == [r is TokenRole.ACTION for r in roles]
        assert [share > 0 for share in row.echo] == [r is TokenRole.OBSERVATION for r in roles]


def test_a_pass_that_does_not_fit_is_halved_and_said(captured, monkeypatch, caplog):
    trainer, _, rows = captured
    whole, _ = gradient(trainer, rows, coeff=0.5)
    loss, room = PolicyUpdate._loss, {"tokens": 500}

    def full(self, model, chosen, micro, *rest):
        if micro.width * micro.height > room["tokens"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, model, chosen, micro, *rest)

    monkeypatch.setattr(PolicyUpdate, "_loss", full)
    halved, seen = gradient(trainer, rows, coeff=0.5, tokens=1600)
    assert seen.passes > 1
    assert close(whole, halved)
    said = [m for m in caplog.messages if "tried again with" in m]
    assert said == [
        "the memory was full in a pass over 1600 tokens; tried again with 800",
        "the memory was full in a pass over 800 tokens; tried again with 400",
    ]
    room["tokens"] = 10  # not even one rollout
    with pytest.raises(torch.OutOfMemoryError):
        gradient(trainer, rows, coeff=0.5)
