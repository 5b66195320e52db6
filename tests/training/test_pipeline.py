"""Real GRPO steps on the tiny model."""

import json
import shutil
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dressage.spec.status import Reason
from tests.conftest import TINY_MODEL
from tests.training.conftest import events_of
from worker.training.pipeline.run import run_job
from worker.training.process.boundary import run_process
from worker.training.process.failures import RunFailure
from worker.training.update.best import BestWeights
from worker.training.update.callbacks import FiniteGradients
from worker.training.update.policy import PolicyUpdate
from worker.training.update.trainer import JobTrainer
from worker.wire.checkpoints import kept, newest_complete
from worker.wire.run_dir import MANIFEST, PAUSE, RunDirectory


def weights(run):
    return load_file(run.path / "final" / "adapter_model.safetensors")


def test_a_run_leaves_everything_behind(make_run):
    run = make_run()
    run_job(run)

    statuses = [event["status"] for event in events_of(run, "status")]
    assert statuses == ["preparing", "training", "evaluating"]
    evaluations = events_of(run, "evaluation")
    assert [e["name"] for e in evaluations] == ["before", "after"]
    assert evaluations[0]["passed"].keys() == evaluations[1]["passed"].keys()
    assert [m["step"] for m in events_of(run, "metrics")] == [1, 2]
    progress = events_of(run, "progress")[-1]
    assert (progress["step"], progress["total_steps"]) == (2, 2)
    assert progress["seconds_per_step"] > 0

    rollouts = events_of(run, "rollout")
    trained = [r for r in rollouts if r["phase"] == "train"]
    held_out = {r["case_id"] for r in rollouts if r["phase"] == "before"}
    assert len(trained) == 2 * 8
    assert not held_out & {r["case_id"] for r in trained}
    for rollout in rollouts:
        assert len(rollout["token_ids"]) == len(rollout["roles"])
        assert rollout["roles"].lstrip("p")[0] == "a"
    assert any("o" in r["roles"] for r in rollouts)
    for group in (trained[at : at + 4] for at in range(0, 16, 4)):
        assert len({r["case_id"] for r in group}) == 1
        assert [r["index"] for r in group] == [0, 1, 2, 3]
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-4)

    manifest = json.loads((run.path / MANIFEST).read_text())
    assert manifest["files"][0]["name"] == "adapter.tar"
    assert manifest["result"]["steps"] == 2
    prompts = [len(r["roles"]) - len(r["roles"].lstrip("p")) for r in rollouts]
    assert manifest["result"]["longest_prompt"] == max(prompts)
    assert manifest["result"]["gain"]["count"] == 1
    with tarfile.open(run.artifacts / "adapter.tar") as archive:
        names = set(archive.getnames())
    assert {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/tokenizer.json",
        "adapter/chat_template.jinja",
    } <= names


def test_without_lora_the_whole_model_is_saved(make_run):
    run = make_run(training={"lora": None, "max_steps": 1})
    run_job(run)
    model = AutoModelForCausalLM.from_pretrained(run.path / "final")
    assert sum(p.numel() for p in model.parameters()) > 2_000_000
    assert (run.artifacts / "model.tar").is_file()


SAME_FOR_ALL = (
    "from dressage.authoring import measure, pass_reason\n\n"
    '@measure\ndef generous(context):\n    return pass_reason("always")\n'
)


def test_equal_rewards_change_nothing(make_run):
    run = make_run(code={"generous.py": SAME_FOR_ALL}, rewards=[{"measure": "generous"}])
    run_job(run)
    assert all(r["advantage"] == 0 for r in events_of(run, "rollout") if r["phase"] == "train")
    assert events_of(run, "metrics")[0]["values"]["groups/no_spread"] == 1.0
    # LoRA's B starts at zero, and stays there without a gradient.
    assert all(t.abs().max() == 0 for name, t in weights(run).items() if "lora_B" in name)


SECRET = '''
import hashlib
from dressage.authoring import fail_reason, function_tool, measure, pass_reason

def stamp(text):
    return hashlib.sha256(text.encode()).hexdigest()[:8]

@function_tool
def calculate(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: The expression.
    """
    return stamp(expression)

@measure
def called_for_real(context):
    for call in context.tool_calls:
        if call.result == stamp(call.arguments["expression"]):
            return pass_reason("the tool's own stamp")
    return fail_reason("no stamp")
'''


def test_a_reward_proves_that_the_tool_was_really_called(make_run):
    run = make_run(code={"tools.py": SECRET}, rewards=[{"measure": "called_for_real"}])
    run_job(run)
    rollouts = events_of(run, "rollout")
    stamped = [r for r in rollouts if any(m["role"] == "tool" for m in r["messages"])]
    assert stamped
    assert all(
        (r["reward"] == 1.0) == any(m["role"] == "tool" for m in r["messages"]) for r in rollouts
    )


def test_a_run_taken_up_at_its_checkpoint_ends_with_the_same_weights(make_run):
    training = {"max_steps": 4, "save_steps": 2, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    whole = make_run("whole", training={**training, "keep_checkpoints": 1})
    run_job(whole)
    (file,) = kept(whole.path)
    assert (file.name, file.kind) == ("checkpoint-4.tar", "checkpoint")
    with tarfile.open(whole.artifacts / file.name) as archive:
        assert {"adapter/adapter_model.safetensors", "adapter/tokenizer.json"} <= {
            *archive.getnames()
        }
        assert "adapter/optimizer.pt" not in archive.getnames()

    first = make_run("first", training={**training, "save_steps": 2})
    run_job(first)
    # What a kill after step 3 leaves behind: no result, and a newest checkpoint cut off.
    (first.checkpoints / "checkpoint-4" / "complete.json").unlink()
    second = make_run("second", training=training, previous=[first.path])
    run_job(second)

    steps = {r["step"] for r in events_of(second, "rollout") if r["phase"] == "train"}
    assert steps == {3, 4}

    def drawn(run):
        return [
            (r["id"], r["token_ids"])
            for r in events_of(run, "rollout")
            if r["phase"] == "train" and r["step"] > 2
        ]

    assert drawn(second) == drawn(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name
    assert [e["name"] for e in events_of(second, "evaluation")] == ["after"]


def test_a_run_killed_in_its_second_epoch_sees_the_same_cases(make_run, arithmetic, monkeypatch):
    options = {
        "cases": arithmetic.cases[:7],  # three steps an epoch, one case held out
        "training": {"max_steps": 7, "save_steps": 2},
        "evaluation": {"holdout": 0.15},
    }
    whole = make_run("whole", **options)
    run_job(whole)

    end_step = JobTrainer.end_step

    def killed(trainer):
        end_step(trainer)
        if trainer.state.global_step == 5:
            raise KeyboardInterrupt

    first = make_run("first", **options)
    with monkeypatch.context() as patch:
        patch.setattr(JobTrainer, "end_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run_job(first)
    second = make_run("second", previous=[first.path], **options)
    run_job(second)

    def cases(run):
        return [
            (r["step"], r["case_id"])
            for r in events_of(run, "rollout")
            if r["phase"] == "train" and r["step"] > 4
        ]

    assert len(cases(second)) == 3 * 8
    assert cases(second) == cases(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_a_paused_run_goes_on_exactly(make_run, monkeypatch):
    whole = make_run("whole", training={"max_steps": 4})
    run_job(whole)
    end_step = JobTrainer.end_step

    def asked(trainer):
        end_step(trainer)
        if trainer.state.global_step == 2:
            (trainer._run.path / PAUSE).touch()

    first = make_run("first", training={"max_steps": 4})
    with monkeypatch.context() as patch:
        patch.setattr(JobTrainer, "end_step", asked)
        with pytest.raises(RunFailure, match="paused on request at step 2") as caught:
            run_job(first)
    assert caught.value.reason is Reason.PAUSED_BY_USER
    second = make_run("second", training={"max_steps": 4}, previous=[first.path])
    run_job(second)
    assert {r["step"] for r in events_of(second, "rollout") if r["phase"] == "train"} == {3, 4}
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_a_pause_before_the_first_step_trains_nothing(make_run):
    run = make_run()
    (run.path / PAUSE).touch()
    with pytest.raises(RunFailure, match="before its first step"):
        run_job(run)


def test_a_damaged_checkpoint_is_passed_over(make_run):
    run = make_run(training={"max_steps": 2, "save_steps": 1})
    run_job(run)
    assert newest_complete((run.path,)).name == "checkpoint-2"
    victim = run.checkpoints / "checkpoint-2" / "adapter_model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-10])
    assert newest_complete((run.path,)).name == "checkpoint-1"


def test_a_measure_that_always_raises_ends_the_run_by_name(make_run):
    code = (
        "from dressage.authoring import measure\n\n@measure\ndef bad(context):\n    return 1 / 0\n"
    )
    run = make_run(code={"bad.py": code}, rewards=[{"measure": "bad"}])
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.USER_CODE_ERROR
    assert caught.value.message == (
        "the measure 'bad' fails on every rollout: ZeroDivisionError: division by zero"
    )


def test_a_measure_that_raises_sometimes_drops_groups_and_counts_them(make_run):
    code = (
        "from dressage.authoring import measure, pass_reason\n\n@measure\ndef moody(context):\n"
        "    if sum(map(ord, context.input)) % 3 == 0:\n        raise ValueError('three')\n"
        "    return pass_reason('even')\n"
    )
    run = make_run(
        code={"moody.py": code},
        rewards=[{"measure": "moody"}],
        evaluation={"holdout": 0.2},
        training={"max_steps": 4},
    )
    run_job(run)
    values = [m["values"] for m in events_of(run, "metrics")]
    assert sum(v["measures/moody/failed"] for v in values) > 0
    assert any(v["groups/dropped"] > 0 for v in values)
    dropped = [r for r in events_of(run, "rollout") if r["reward"] is None]
    assert dropped
    assert all(r["advantage"] in (0, None) for r in dropped)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import os; os._exit(9)", "the process ended during the call"),
        ("while True: pass", "no result within 0.2 seconds"),
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("return 'x' * 5_000_000", None),
    ],
)
def test_bad_tools_are_data_and_training_goes_on(make_run, body, error):
    code = (
        "from dressage.authoring import function_tool\n\n@function_tool\n"
        "def calculate(expression: str) -> str:\n"
        '    """Evaluate arithmetic.\n\n    Args:\n        expression: The expression.\n    """\n'
        f"    {body}\n"
    )
    training = {"tool_timeout": 0.2, "max_steps": 1, "max_completion_length": 200}
    run = make_run(code={"tools.py": code}, training={**training, "max_tool_output": 64})
    run_job(run)
    texts = {
        message["content"]
        for rollout in events_of(run, "rollout")
        for message in rollout["messages"]
        if message["role"] == "tool"
    }
    cut = "x" * 64 + "\n[truncated: 4999936 more characters]"
    assert texts == {json.dumps({"error": error}) if error else cut}
    failed_share = events_of(run, "metrics")[0]["values"]["tools/failed_share"]
    assert failed_share == (1.0 if error else 0.0)


def test_a_missing_model_has_its_reason(make_run, job_spec):
    run = make_run(agent={**job_spec["agent"], "model": "Org/Nothing"})
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert "Org/Nothing" in caught.value.message


def test_a_model_whose_weights_are_no_numbers_stops_the_run(make_run):
    run = make_run()
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    broken = run.path / "broken"
    shutil.copytree(TINY_MODEL, broken)
    model.save_pretrained(broken)
    spec = run.spec()
    agent = spec.job.agent.model_copy(update={"model": str(broken)})
    job = spec.job.model_copy(update={"agent": agent})
    (run.path / "spec.json").write_text(spec.model_copy(update={"job": job}).model_dump_json())
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.NUMERICAL_ERROR


def test_a_gradient_that_is_no_number_never_reaches_the_weights(make_run, monkeypatch):
    update, steps = PolicyUpdate.__call__, []

    def overflow(self, model, rows, **options):
        steps.append(len(rows))
        if len(steps) == 2:
            rows = [replace(row, policy=[s * 1e60 for s in row.policy]) for row in rows]
        return update(self, model, rows, **options)

    monkeypatch.setattr(PolicyUpdate, "__call__", overflow)
    run = make_run(training={"max_steps": 4, "save_steps": 1})
    with pytest.raises(RunFailure, match="not a number at step 2") as caught:
        run_job(run)
    assert caught.value.reason is Reason.NUMERICAL_ERROR
    assert newest_complete((run.path,)).name == "checkpoint-1"


def test_the_best_weights_are_kept_and_proved_on_other_cases(make_run, monkeypatch):
    """With a learning rate that ruins the model, what is kept is an early step."""
    run = make_run(
        training={"max_steps": 4, "learning_rate": 0.5, "lr_scheduler": "constant"},
        evaluation={"holdout": 0.4, "every_steps": 1, "temperature": 0},
        rewards=[{"measure": {"type": "length_limit", "max_words": 8}}],
    )
    kept = {}
    offer = BestWeights.offer

    def remember(self, model, *, step, score):
        better = offer(self, model, step=step, score=score)
        if better:
            kept.update(
                {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            )
        return better

    monkeypatch.setattr(BestWeights, "offer", remember)
    run_job(run)
    evaluations = {e["name"]: e for e in events_of(run, "evaluation")}
    assert list(evaluations) == ["before", "step-1", "step-2", "step-3", "step-4", "after"]
    chosen_by = set(evaluations["step-1"]["passed"])
    proved_on = set(evaluations["after"]["passed"])
    assert set(evaluations["before"]["passed"]) == proved_on
    assert not chosen_by & proved_on
    trained = {r["case_id"] for r in events_of(run, "rollout") if r["phase"] == "train"}
    assert not trained & (chosen_by | proved_on)

    result = json.loads((run.path / MANIFEST).read_text())["result"]
    steps = [evaluations[f"step-{n}"] for n in (1, 2, 3, 4)]
    scores = [(e["pass_rate"], e["mean_reward"]) for e in steps]
    assert result["best_step"] == scores.index(max(scores)) + 1
    assert evaluations["after"]["step"] == result["best_step"]
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, kept[name.replace(".weight", ".default.weight")])


def test_a_run_that_gets_no_better_stops(make_run):
    run = make_run(
        training={"max_steps": 50},
        code={"generous.py": SAME_FOR_ALL},
        rewards=[{"measure": "generous"}],
        evaluation={"holdout": 0.1, "every_steps": 1, "patience": 2},
    )
    run_job(run)
    assert events_of(run, "progress")[-1]["step"] == 3
    assert json.loads((run.path / MANIFEST).read_text())["result"]["best_step"] == 1


def test_tensorboard_files_become_an_artifact(make_run):
    run = make_run(training={"report_to": ["tensorboard"], "max_steps": 1})
    run_job(run)
    names = [file["name"] for file in json.loads((run.path / MANIFEST).read_text())["files"]]
    assert names == ["adapter.tar", "tools.json", "tensorboard.tar"]
    (tool,) = json.loads((run.artifacts / "tools.json").read_text())
    assert list(tool["function"]["parameters"]) == ["type", "required", "properties"]
    with tarfile.open(run.artifacts / "tensorboard.tar") as archive:
        assert any("events.out.tfevents" in name for name in archive.getnames())


def test_what_this_worker_cannot_do_is_said_before_the_model_is_loaded(make_run):
    for field, value, text in (
        ("report_to", ["wandb"], "lacks the package wandb"),
        ("load_in_4bit", True, "needs a CUDA GPU"),
    ):
        run = make_run(field, training={field: value})
        with pytest.raises(RunFailure, match=text) as caught:
            run_job(run)
        assert caught.value.reason is Reason.MISSING_DEPENDENCY


def test_the_isolation_of_user_code_is_named(make_run, caplog):
    caplog.set_level("INFO")
    run = make_run(training={"max_steps": 1})
    run_job(run)
    isolation = json.loads((run.path / MANIFEST).read_text())["result"]["isolation"]
    assert isolation.split(",")[0] in ("bubblewrap", "landlock", "limits")
    assert f"the suite's code runs behind: {isolation}" in caplog.messages


def test_the_last_steps_have_their_metrics_whatever_logging_steps_says(make_run):
    run = make_run(training={"max_steps": 3, "logging_steps": 2})
    run_job(run)
    lines = events_of(run, "metrics")
    assert [line["step"] for line in lines] == [2, 3]
    result = json.loads((run.path / MANIFEST).read_text())["result"]
    assert result["final_loss"] == lines[-1]["values"]["loss"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_job_without_one_scored_group_fails_with_the_measures_name(make_run, steps):
    code = (
        "from dressage.authoring import measure\n\n@measure\ndef bad(context):\n    return 1 / 0\n"
    )
    run = make_run(
        code={"bad.py": code},
        rewards=[{"measure": "bad"}],
        training={"max_steps": steps},
        evaluation={"holdout": 0},
    )
    with pytest.raises(RunFailure, match="the measure 'bad' fails on every rollout"):
        run_job(run)


def test_a_run_resumed_at_its_last_step_trains_no_more(make_run):
    """3 steps of 7 in an epoch: the checkpoint of the last one is not trained past."""
    whole = make_run("whole", training={"max_steps": 3, "save_steps": 3})
    run_job(whole)
    again = make_run("again", training={"max_steps": 3, "save_steps": 3}, previous=[whole.path])
    run_job(again)
    assert events_of(again, "progress") == []
    assert all((weights(whole)[name] == value).all() for name, value in weights(again).items())


def test_what_resampling_plays_is_stored_under_ids_of_its_own(make_run, arithmetic):
    from tests.training.test_governor import PICKY

    run = make_run(
        code={"picky.py": PICKY},
        rewards=[{"measure": "picky"}],
        cases=[
            case.model_copy(update={"metadata": {"number": number}})
            for number, case in enumerate(arithmetic.cases[:6])
        ],
        training={"resample_dead_groups": 6, "max_steps": 3},
        evaluation={"holdout": 0},
    )
    run_job(run)
    rollouts = [r for r in events_of(run, "rollout") if r["phase"] == "train"]
    assert len({r["id"] for r in rollouts}) == len(rollouts) == 3 * 8
    assert any(r["resampled"] for r in rollouts)
    assert all(("-try-" in r["id"]) is r["resampled"] for r in rollouts)


def test_cases_that_leave_no_room_are_all_named_before_the_first_step(make_run, arithmetic):
    long = [
        arithmetic.cases[at].model_copy(update={"input": "What is 1 + 1? " * 400}) for at in (3, 5)
    ]
    cases = [*arithmetic.cases[:3], long[0], arithmetic.cases[4], long[1], *arithmetic.cases[6:30]]
    run = make_run("refused", cases=cases, evaluation={"holdout": 0})
    with pytest.raises(RunFailure, match="2 of 30 cases have prompts that leave no room") as caught:
        run_job(run)
    assert caught.value.reason is Reason.SUITE_INVALID
    assert all(repr(case.id) in caught.value.message for case in long)
    assert not events_of(run, "rollout")
    run = make_run(
        "dropped",
        cases=cases,
        evaluation={"holdout": 0},
        training={"too_long_cases": "drop", "max_steps": 1},
    )
    run_job(run)
    (warning,) = [w for w in events_of(run, "warning") if w["code"] == "cases_dropped"]
    assert all(repr(case.id) in warning["message"] for case in long)


def test_patience_goes_on_where_it_was_and_a_step_counts_once(tmp_path):
    model = torch.nn.Linear(2, 2)
    first = BestWeights(tmp_path / "first", [])
    assert first.offer(model, step=1, score=(0.5, 0.0))
    assert not first.offer(model, step=2, score=(0.4, 0.0))
    assert not first.offer(model, step=3, score=(0.5, 0.0))
    again = BestWeights(tmp_path / "again", [tmp_path / "first"])
    assert (again.step, again.evaluations_since) == (1, 2)
    # Taken up at the checkpoint of step 1: steps 2 and 3 are seen again, and are no news.
    assert not again.offer(model, step=2, score=(0.4, 0.0))
    assert again.evaluations_since == 2
    assert not again.offer(model, step=4, score=(0.1, 0.0))
    assert again.evaluations_since == 3
    again.restore(model)
    third = BestWeights(tmp_path / "third", [tmp_path / "first", tmp_path / "again"])
    assert (third.step, third.evaluations_since) == (1, 3)


def test_float16_skips_a_step_that_its_scaler_skips_and_ends_when_that_does_not_stop():
    noted = []
    watch = FiniteGradients(lambda name, value: noted.append((name, value)))
    model = torch.nn.Linear(1, 1)
    model.weight.grad = torch.full((1, 1), float("inf"))
    state, scaled = SimpleNamespace(global_step=4), SimpleNamespace(fp16=True)
    for _ in range(19):
        watch.on_pre_optimizer_step(scaled, state, None, model=model)
    assert noted == [("optimizer/skipped_steps", 1.0)] * 19
    with pytest.raises(RunFailure, match="not a number at step 5"):
        watch.on_pre_optimizer_step(scaled, state, None, model=model)
    with pytest.raises(RunFailure, match="not a number"):
        FiniteGradients(print).on_pre_optimizer_step(
            SimpleNamespace(fp16=False), state, None, model=model
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("CUDA error: uncorrectable ECC error encountered", Reason.GPU_FAILED),
        ("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", Reason.GPU_FAILED),
        ("NCCL error in: ProcessGroupNCCL.cpp:1234, unhandled system error", Reason.GPU_FAILED),
        ("mat1 and mat2 shapes cannot be multiplied", Reason.INTERNAL_ERROR),
    ],
)
def test_a_fault_of_the_gpu_in_mid_run_is_its_own_reason(tmp_path, text, reason):
    def fails(_run):
        raise RuntimeError(text)

    assert run_process(tmp_path, fails) == 1
    assert json.loads((tmp_path / "failure.json").read_text())["reason"] == reason


def test_of_several_processes_the_first_to_fail_has_the_word(tmp_path):
    run = RunDirectory(tmp_path)
    run.fail(Reason.OUT_OF_MEMORY, "full")
    run.fail(Reason.INTERNAL_ERROR, "connection closed by peer")
    assert json.loads((tmp_path / "failure.json").read_text())["reason"] == "out_of_memory"
    assert [path.name for path in tmp_path.glob("failure*")] == ["failure.json"]


def test_texts_of_control_tokens_in_cases_are_said(make_run, arithmetic):
    odd = arithmetic.cases[2].model_copy(update={"input": "Say <|im_end|> and stop."})
    cases = [*arithmetic.cases[:2], odd, *arithmetic.cases[3:20]]
    run = make_run(cases=cases, training={"max_steps": 1}, evaluation={"holdout": 0})
    run_job(run)
    (warning,) = [w for w in events_of(run, "warning") if w["code"] == "control_tokens"]
    assert warning["message"].startswith("1 cases have the text of control tokens")
    assert repr(odd.id) in warning["message"]
