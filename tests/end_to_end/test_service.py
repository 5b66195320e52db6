"""POST → real training on the tiny model → files, through whatever dies on the way."""

import json
import os
import signal
import subprocess
import tarfile

import psycopg
import pytest
from transformers import AutoTokenizer

from dressage.client import ApiError, Client
from dressage.spec.status import JobStatus
from tests.conftest import ARITHMETIC, TINY_MODEL
from tests.end_to_end.conftest import free_port
from tests.waiting import wait_for


@pytest.fixture
def spec(client, job_spec):
    client.push_suite(ARITHMETIC, "arithmetic")
    return job_spec


def finished(client, job_id, seconds=120):
    def ended():
        job = client.job(job_id)
        return job if job.finished_at else None

    return wait_for(ended, seconds)


def database(service):
    password = (service.data / "secrets" / "postgres").read_text()
    return f"postgresql://dressage:{password}@/dressage?host={service.data}/run&port=5432"


def attempts(service, job_id):
    with psycopg.connect(database(service)) as connection:
        return connection.execute(
            "SELECT number, outcome, started_at, ended_at FROM attempts WHERE work_id = %s "
            "ORDER BY number",
            [job_id],
        ).fetchall()


def present_workers(service):
    with psycopg.connect(database(service)) as connection:
        rows = connection.execute(
            "SELECT queue FROM workers WHERE heartbeat_at > now() - interval '6 seconds'"
        ).fetchall()
    return {queue for (queue,) in rows}


EXPORTED = ("merged.tar", "model-q8_0.gguf")


def test_the_main_job(service, client, spec, tmp_path):
    spec["exports"] = [{"type": "gguf", "quantization": "q8_0"}, {"type": "merged"}]
    spec["training"] |= {"batch_size": 3, "num_generations": 4, "learning_rate": 1e-3}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(spec))
    done = service.dressage("submit", str(path), "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adjusted training.gradient_accumulation: 1 → 4" in done.stderr
    assert "evaluation after: pass rate" in done.stdout

    job = client.jobs(name="small").items[0]
    assert (job.status, job.reason) == (JobStatus.SUCCEEDED, "completed")
    assert {export.name: export.status for export in job.exports} == {
        "gguf-q8_0": "succeeded",
        "merged": "succeeded",
    }
    assert job.result["steps"] == 2
    metrics = client.metrics(job.id)
    assert [row.step for row in metrics.items] == [1, 2]
    assert "measures/correct_answer" in metrics.items[0].values
    evaluations = client.evaluations(job.id)
    assert [e.name for e in evaluations.items] == ["before", "after"]
    assert evaluations.gain.count == job.result["gain"]["count"] == job.result["cases"]["held_out"]

    events = list(client.follow(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert list(client.follow(job.id, after=len(events) - 3)) == events[-3:]

    rollout = client.rollouts(job.id, phase="train", limit=1).items[0]
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    prompt = rollout.token_ids[: rollout.roles.count("p")]
    assert "Use the calculator." in tokenizer.decode(prompt)
    assert rollout.verdicts[0].measure == "correct_answer"

    asked = client.generate(
        job.id, {"prompt": "What is 6 * 7?", "execute_tools": True, "temperature": 0}, wait=120
    )
    assert asked.status == "succeeded", asked.message
    assert asked.result.messages[0]["content"].startswith("Solve the exercise.")
    assert asked.result.messages[1]["content"] == "What is 6 * 7?"
    assert asked.result.prompt_tokens > 50
    assert asked.result.stop_reason in ("completed", "max_completion_length")
    assert client.job(job.id).status == JobStatus.SUCCEEDED
    assert {export.name for export in client.job(job.id).exports} == {"gguf-q8_0", "merged"}

    done = service.dressage("pull", job.id, "--to", str(tmp_path / "files"), "--history")
    assert done.returncode == 0, done.stderr
    names = {file.name for file in (tmp_path / "files").iterdir() if file.is_file()}
    history = {"report.md", "job.json", "metrics.csv", "evaluations.json", "rollouts.jsonl"}
    assert names == {".dressage-job", "adapter.tar", "tools.json", *EXPORTED, *history}
    lines = (tmp_path / "files" / "rollouts.jsonl").read_text().splitlines()
    told = [event for event in events if event.type == "rollout"]
    assert [json.loads(line)["id"] for line in lines] == [event.data["id"] for event in told]
    assert (tmp_path / "files" / "metrics.csv").read_text().splitlines()[1].startswith("1,")
    assert json.loads((tmp_path / "files" / "job.json").read_text())["id"] == job.id
    report = (tmp_path / "files" / "report.md").read_text()
    assert report.startswith("# small\n")
    assert f"on {evaluations.gain.count} cases" in report
    assert "| 2 | " in report.partition("## Training")[2]
    assert (tmp_path / "files" / "adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "files" / "merged" / "model.safetensors").is_file()
    with tarfile.open(tmp_path / "files" / "merged.tar") as archive:
        assert "merged/model.safetensors" in archive.getnames()
    assert (tmp_path / "files" / "model-q8_0.gguf").read_bytes()[:4] == b"GGUF"

    done = service.dressage("export", job.id, "gguf", "quantization=f16", "parity_cases=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gguf-f16 succeeded" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if "100%" in line] == [
        *("merged", "gguf-f16"),
    ]
    refused = service.dressage("export", job.id, "gguf", "quantization=q9")
    assert refused.returncode == 1
    assert "quantization" in refused.stderr
    refused = service.dressage("export", job.id, "gguf", "nonsense")
    assert "'nonsense' is no name=value" in refused.stderr


def test_a_job_without_signal_pauses_and_goes_on_when_resumed(service, client, spec, tmp_path):
    spec["rewards"] = [{"measure": {"type": "regex", "pattern": "never said"}}]
    spec["preflight"] = {"cases": 4}
    spec["name"] = "nothing to learn"
    path = tmp_path / "job.json"
    path.write_text(json.dumps(spec))
    done = service.dressage("submit", str(path), "--watch")
    assert done.returncode == 1
    assert "pre-flight: stop" in done.stdout
    job = client.jobs(name="nothing to learn").items[0]
    assert (job.status, job.reason) == (JobStatus.PAUSED, "no_learning_signal")
    assert "there is nothing to learn from" in job.message
    assert service.dressage("resume", job.id).returncode == 0
    assert finished(client, job.id).status == JobStatus.SUCCEEDED
    with pytest.raises(ApiError, match="only a paused job can be resumed"):
        client.resume(job.id)


def test_a_preflight_alone_leaves_a_report(service, client, spec, tmp_path):
    spec["preflight"] = {"cases": 4}
    spec["exports"] = [{"type": "merged"}]
    path = tmp_path / "job.json"
    path.write_text(json.dumps(spec))
    done = service.dressage("preflight", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pre-flight: " in done.stdout
    job = client.job(done.stdout.split()[0])
    assert (job.status, job.artifacts, job.exports) == (JobStatus.SUCCEEDED, (), ())
    assert job.result["preflight"]["cases"] == 4
    with pytest.raises(ApiError, match="only a trained one has a result to use"):
        client.generate(job.id, {"prompt": "x"})


def test_a_killed_worker_loses_nothing(service, client, spec):
    spec["training"] |= {"max_steps": 14, "save_steps": 2}
    job_id = client.submit(spec).id
    wait_for(lambda: client.job(job_id).progress.step >= 4)
    worker = service.pid("-Q training")
    children = f"worker.training {service.data}"
    assert running(children)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not running(f"{job_id}/attempt-1"), 5)

    job = finished(client, job_id)
    assert (job.status, job.attempts) == (JobStatus.SUCCEEDED, 2)
    (_, first, _, first_end), (_, second, second_start, _) = attempts(service, job_id)
    assert (first, second) == ("lost", "succeeded")
    assert first_end <= second_start  # never two owners
    logs = [e.data["message"] for e in client.follow(job_id) if e.type == "log"]
    assert any(message.startswith("continuing from checkpoint-") for message in logs)
    assert [row.step for row in client.metrics(job_id).items] == list(range(1, 15))
    assert not running(children)


def test_a_killed_program_is_started_again(service, client, spec):
    spec["training"] |= {"max_steps": 12, "save_steps": 2}
    job_id = client.submit(spec).id
    wait_for(lambda: client.job(job_id).progress.step >= 1)
    os.kill(service.pid("bin/postgres"), signal.SIGKILL)
    wait_for(lambda: service.pid("bin/postgres"), 10)

    def ended():
        try:
            job = client.job(job_id)
        except Exception:  # noqa: BLE001  it is down for a moment
            return None
        return job if job.finished_at else None

    job = wait_for(ended, 120)
    assert job.status is JobStatus.SUCCEEDED
    wait_for(lambda: present_workers(service) == {"training", "exports"}, 10)
    assert [row.step for row in client.metrics(job_id).items] == list(range(1, 13))


def test_cancel_while_training(service, client, spec):
    spec["training"] |= {"max_steps": 500}
    job_id = client.submit(spec).id
    wait_for(lambda: client.job(job_id).progress.step >= 1)
    done = service.dressage("cancel", job_id)
    assert done.stdout.strip() == f"{job_id} is cancelling"
    job = finished(client, job_id, 10)
    assert job.status is JobStatus.CANCELLED
    wait_for(lambda: not running(f"{job_id}/attempt-1"), 5)
    with pytest.raises(ApiError) as caught:
        client.cancel(job_id)
    assert (caught.value.status, caught.value.code) == (409, "job_already_finished")


def test_a_hub_model_that_is_not_there_fails_with_its_reason(client, spec):
    spec["agent"]["model"] = "Org/Nothing-GGUF:Q4_0"
    job = finished(client, client.submit(spec).id)
    assert (job.status, job.reason) == (JobStatus.FAILED, "model_not_found")
    assert "'Org/Nothing'" in job.message


def test_stopping_and_starting_again_keeps_everything(service, client, spec):
    spec["training"] |= {"max_steps": 14, "save_steps": 2}
    job_id = client.submit(spec).id
    wait_for(lambda: client.job(job_id).progress.step >= 3)
    service.stop()
    assert not running(str(service.data))
    service.start()
    job = finished(client, job_id)
    assert (job.status, job.attempts) == (JobStatus.SUCCEEDED, 2)
    assert [a[1] for a in attempts(service, job_id)] == ["released", "succeeded"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("submit", "no-such-file.json"), 2, "No such file"),
        (("watch", "job_nothing"), 1, "there is no job 'job_nothing'"),
        (("pull", "job_nothing"), 1, "there is no job 'job_nothing'"),
        (("suites", "push", "nowhere", "--name", "x"), 1, "no file or folder 'nowhere'"),
        (("suites", "push", str(ARITHMETIC), "--name", "a b"), 1, "name: String should match"),
    ],
)
def test_wrong_commands_get_sentences(service, arguments, code, sentence):
    done = service.dressage(*arguments)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_directory_in_use_is_refused(service):
    done = service.dressage("up", "--data-dir", str(service.data), "--port", "0")
    assert done.returncode == 1
    assert "is in use by another `dressage up`" in done.stderr


def test_a_port_in_use_is_refused(service, tmp_path):
    done = service.dressage("up", "--data-dir", str(tmp_path / "d"), "--port", str(service.port))
    assert done.returncode == 1
    assert f"port {service.port} on 127.0.0.1 is in use" in done.stderr


def test_the_service_gives_nothing_without_its_key(service, tmp_path):
    with Client(service.url, key="drs_wrong") as stranger, pytest.raises(ApiError) as caught:
        stranger.jobs()
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")
    shown = service.dressage("keys", "show")
    assert shown.stdout.strip() == service.key
    file = service.root / "config" / "dressage" / "config.json"
    assert file.stat().st_mode & 0o077 == 0


def test_an_operator_makes_a_team_a_key_and_sees_what_was_done(service):
    assert service.dressage("teams", "set", "search", "--max-running-gpus", "2").returncode == 0
    made = service.dressage("keys", "create", "--team", "search", "--role", "viewer")
    with Client(service.url, key=made.stdout.strip()) as viewer:
        assert viewer.teams()[0].max_running_gpus == 2
        with pytest.raises(ApiError, match="viewer"):
            viewer.cancel("job_x")
        (key,) = viewer.keys().items
    assert f"{key.id} is revoked" in service.dressage("keys", "revoke", key.id).stdout
    assert "revoked" in service.dressage("keys", "list").stdout
    assert "DELETE /keys/{key_id}" in service.dressage("audit").stdout
    assert "default" in service.dressage("usage").stdout
    assert service.dressage("usage", "--csv").stdout.startswith("team,job_id,attempt,")


def test_a_drained_worker_takes_nothing_until_it_is_activated(service, client, spec):
    (worker,) = [w for w in client.workers() if w.queue == "training"]
    assert "draining" in service.dressage("drain", worker.id).stdout
    job_id = client.submit(spec).id
    reason = "every worker with a CPU slot is draining"
    wait_for(lambda: client.job(job_id).waiting and client.job(job_id).waiting.reason == reason)
    assert reason in service.dressage("queue").stdout
    assert "drained by an operator" in service.dressage("workers").stdout
    assert "active" in service.dressage("activate", worker.id).stdout
    assert finished(client, job_id).status is JobStatus.SUCCEEDED


def test_servers_given_by_address_are_used_and_not_started(service, tmp_path):
    done = service.dressage(
        *("up", "--data-dir", str(tmp_path / "d"), "--port", str(free_port())),
        *("--database-url", "postgresql://x@127.0.0.1:1/x", "--redis-url", "redis://127.0.0.1:1"),
    )
    assert done.returncode == 1
    assert "the database does not answer" in done.stderr
    assert "starting postgres" not in done.stdout


def test_nothing_answers_is_a_sentence():
    from dressage.client import Client, ServiceUnreachable

    with Client("http://127.0.0.1:1") as client, pytest.raises(ServiceUnreachable, match="up"):
        client.jobs()


def running(marker):
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    return any(marker in line for line in listed.stdout.splitlines())
