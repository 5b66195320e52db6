"""Every command through its door: what it prints, and 0, 1 (refused) or 2 (wrong usage)."""

import datetime
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import typer

from dressage.cli.main import app
from tests.conftest import ARITHMETIC, TINY_MODEL
from tests.servers import KEYS
from tests.waiting import wait_for
from tests.worker.steps import work

COMMAND = typer.main.get_command(app)


def commands(group=COMMAND, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.fixture
def job_file(job_spec, tmp_path):
    """Writes a specification as a file."""

    def write(**changes):
        file = tmp_path / "job.json"
        file.write_text(json.dumps({**job_spec, **changes}))
        return file

    return write


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_explains_itself(dressage, path):
    said = dressage(*path, "--help").stdout
    assert f"Usage: root {' '.join(path)}".strip() in said
    # A sentence of its own, not only options.
    assert said.split("Usage:")[1].strip().splitlines()[2].strip(" .") != ""


def test_a_suite_from_upload_to_deletion(operator):
    said = operator("suites", "push", ARITHMETIC, "--name", "sums").stdout
    assert said.startswith("sums@1: 384 cases, tools: calculate, measures: correct_answer")
    assert operator("suites", "push", ARITHMETIC, "--name", "sums").stdout == said
    assert "sums@1" in operator("suites", "list").stdout
    assert "sums@1" not in operator("suites", "list", "--name", "other").stdout
    operator("suites", "delete", "sums@1")
    assert "sums@1" not in operator("suites", "list").stdout
    assert "refused" in operator("suites", "delete", "sums@1", code=1).stderr


def test_a_job_is_checked_submitted_and_watched(operator, suite, worker, job_file):
    dry = json.loads(operator("submit", job_file(name="ok"), "--dry-run").stdout)
    assert dry["spec"]["name"] == "ok"
    said = operator("submit", job_file(name="ok"), "--watch").stdout
    job_id = next(line for line in said.splitlines() if line.startswith("job_"))
    assert "succeeded" in said
    assert job_id in operator("jobs", "--status", "succeeded").stdout
    assert job_id not in operator("jobs", "--status", "failed").stdout
    assert "adapter.tar" in operator("watch", job_id).stdout
    failed = operator("submit", job_file(name="user error"), "--watch", code=1).stdout
    assert "failed your measure is broken" in failed


def test_the_same_idempotency_key_makes_one_job(operator, suite, job_file):
    first, second = (
        operator("submit", job_file(), "--idempotency-key", "once").stdout for _ in range(2)
    )
    assert first == second


def test_a_job_that_is_set_aside_and_goes_on(operator, context, submit):
    job_id = submit("pausable")
    running = threading.Thread(target=work, args=(context,))
    running.start()
    wait_for(lambda: "1/2" in operator("jobs").stdout)
    assert operator("pause", job_id).stdout == f"{job_id} is pausing\n"
    running.join()
    assert "set aside" in operator("watch", job_id, code=1).stdout
    assert operator("resume", job_id).stdout == f"{job_id} is queued\n"
    assert job_id in operator("queue").stdout
    assert operator("cancel", job_id).stdout == f"{job_id} is cancelled\n"
    assert operator("retry", job_id).stdout.strip() != job_id
    assert operator("delete", job_id).stdout == ""
    assert "refused (not_found)" in operator("watch", job_id, code=1).stderr


def test_files_and_history_are_pulled_and_unpacked(operator, context, submit, tmp_path):
    job_id = submit("ok")
    assert f"{job_id} has no files (queued)" in operator("pull", job_id, code=1).stderr
    work(context)
    operator("pull", job_id, "--to", tmp_path / "files", "--history")
    found = {path.name for path in (tmp_path / "files").iterdir()}
    assert found == {
        *("adapter", "adapter.tar", ".dressage-job"),
        *("report.md", "job.json", "metrics.csv", "evaluations.json", "rollouts.jsonl"),
    }
    assert (tmp_path / "files" / "adapter" / "weights").read_bytes() == b"w" * 1000
    assert json.loads((tmp_path / "files" / "job.json").read_text())["id"] == job_id
    other = submit("ok")
    work(context)
    refused = operator("pull", other, "--to", tmp_path / "files", code=1).stderr
    assert f"has the files of {job_id}; choose another folder with --to" in refused


def test_watching_goes_on_past_a_pause_that_is_over(operator, context, submit):
    job_id = submit("ok")
    operator("pause", job_id)
    at_rest = operator("watch", job_id, code=1).stdout
    assert "paused" in at_rest
    operator("resume", job_id)
    work(context)
    assert "\nsucceeded\n" in operator("watch", job_id).stdout


def test_a_file_is_made_of_a_trained_job(operator, worker, submit):
    job_id = submit("ok")
    wait_for(lambda: job_id in operator("jobs", "--status", "succeeded").stdout)
    said = operator("export", job_id, "gguf", "quantization=q8_0", "parity_cases=0").stdout
    assert said.splitlines()[-1].startswith("gguf-q8_0 succeeded")
    assert operator("export", job_id, "merged", "--no-wait").stdout == "merged queued\n"
    refused = operator("export", job_id, "gguf", "parity_cases=NaN", code=1).stderr
    assert "refused (validation_error)" in refused
    assert "no name=value" in operator("export", job_id, "gguf", "q8_0", code=2).stderr
    assert "refused (validation_error)" in operator("export", job_id, "gguf", "no=1", code=1).stderr


def test_a_look_before_training(operator, suite, worker, job_file):
    said = operator("preflight", job_file(name="ok")).stdout
    assert said.splitlines()[0].startswith("job_")


def test_workers_are_shown_drained_and_taken_back(operator, context):
    name = context.worker_id
    assert name in operator("workers").stdout
    assert operator("drain", name).stdout == f"{name} is draining\n"
    assert "draining" in operator("workers").stdout
    assert operator("activate", name).stdout == f"{name} is active\n"
    assert "refused (not_found)" in operator("drain", "nobody", code=1).stderr


def test_keys_are_made_listed_used_and_revoked(operator, service, monkeypatch):
    operator("teams", "set", "search", "--max-running-gpus", "4", "--gpu-hours-per-day", "2.5")
    (row,) = [line for line in operator("teams", "list").stdout.splitlines() if "search" in line]
    assert "0 of 4" in row
    made = operator("keys", "create", "--team", "search", "--role", "viewer", "--name", "[ci]")
    secret = made.stdout.strip()
    key_id = made.stderr.split(":")[0]
    listed = operator("keys", "list").stdout
    assert key_id in listed
    assert "[ci]" in listed
    assert secret not in listed

    monkeypatch.delenv("DRESSAGE_API_KEY")
    assert "no key for" in operator("keys", "show", code=1).stderr
    operator("keys", "use", secret)
    assert operator("keys", "show").stdout == f"{secret}\n"
    operator("jobs")
    assert "refused (not_allowed)" in operator("teams", "set", "mine", code=1).stderr

    monkeypatch.setenv("DRESSAGE_API_KEY", KEYS["operator"])
    assert operator("keys", "revoke", key_id).stdout == f"{key_id} is revoked\n"
    (row,) = [line for line in operator("keys", "list").stdout.splitlines() if key_id in line]
    assert "revoked" in row
    monkeypatch.setenv("DRESSAGE_API_KEY", "drs_made_up")
    assert "refused (unauthorized)" in operator("jobs", code=1).stderr


def test_a_program_reads_a_new_key_with_its_secret_and_a_revoked_one_without(operator):
    operator("teams", "set", "search")
    made = json.loads(operator("keys", "create", "--team", "search", "--json").stdout)
    assert made["secret"].startswith(made["prefix"])
    ended = json.loads(operator("keys", "revoke", made["id"], "--json").stdout)
    assert ended["id"] == made["id"]
    assert ended["revoked_at"]
    assert "secret" not in ended


def test_usage_and_audit(operator, context, submit):
    yesterday = str(datetime.date.today() - datetime.timedelta(days=1))
    job_id = submit("ok")
    work(context)
    assert "default" in operator("usage").stdout
    assert job_id in operator("usage", "--by", "job", "--since", yesterday).stdout
    header, row = operator("usage", "--csv").stdout.splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["attempts"] == "1"
    assert job_id in operator("audit").stdout


@pytest.mark.parametrize(
    "line",
    [
        ("submit", "no-such-file.json"),
        ("submit", str(ARITHMETIC / "cases.jsonl")),
        ("submit",),
        ("jobs", "--status", "lost"),
        ("jobs", "--limit", "many"),
        ("usage", "--since", "yesterday"),
        ("suites", "push"),
        ("keys", "create", "--team", "x", "--role", "king"),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_two(dressage, line):
    said = dressage(*line, code=2)
    assert said.stdout == ""
    assert said.stderr.startswith("Usage:")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[", "ftp://host"])
def test_no_service_is_one_sentence(dressage, url):
    for line in (("jobs",), ("watch", "job_x"), ("suites", "push", ARITHMETIC, "--name", "x")):
        said = dressage(*line, "--url", url, code=1)
        assert said.stdout == ""
        assert said.stderr.startswith(f"error: no service answers at {url} (")


def test_what_is_refused_is_listed_whole(operator, suite, job_file):
    file = job_file(agent={"model": "x"}, training={"max_steps": -1}, rewards=[])
    said = operator("submit", file, code=1).stderr
    assert said.startswith("refused (validation_error): ")
    assert "training.max_steps" in said
    assert "rewards" in said


@pytest.mark.parametrize("content", ["[1, 2]", "null", '"text"', "[" * 150 + "]" * 150])
def test_a_specification_of_a_strange_kind_is_refused(operator, content, tmp_path):
    file = tmp_path / "job.json"
    file.write_text(content)
    assert "refused (validation_error): " in operator("submit", file, code=1).stderr


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"name": NaN}', b'{"name": 1e999}', b"\xff\xfe{}"]
)
def test_a_file_that_is_no_json_is_wrong_usage(dressage, content, tmp_path):
    file = tmp_path / "job.json"
    file.write_bytes(content)
    for command in ("submit", "preflight"):
        said = dressage(command, file, code=2).stderr.replace("│", "")
        assert "is not JSON: " in " ".join(said.split())


def test_a_suite_that_is_none_is_a_sentence(operator, tmp_path):
    assert "error:" in operator("suites", "push", tmp_path, "--name", "x", code=1).stderr
    missing = operator("suites", "push", tmp_path / "none", "--name", "x", code=1)
    assert "none" in missing.stderr


def test_files_are_not_pulled_into_a_file(operator, context, submit, tmp_path):
    job_id = submit("ok")
    work(context)
    file = tmp_path / "file"
    file.write_text("mine")
    for options in ((), ("--history",)):
        assert str(file) in operator("pull", job_id, "--to", file, *options, code=1).stderr
    assert file.read_text() == "mine"


def test_a_service_that_cannot_start_is_a_sentence(tmp_path):
    """In a process of its own: `up` is the one command that must not be started here."""
    (tmp_path / "data").write_text("a file")
    done = subprocess.run(
        [sys.executable, "-m", "dressage.cli.main", "up", "--data-dir", tmp_path / "data"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dressage up: ")
    assert "cannot be made" in " ".join(done.stderr.split())


def test_a_suite_beside_a_jobs_file_is_pushed_with_it(operator, job_file, tmp_path):
    folder = tmp_path / "my sums"
    shutil.copytree(ARITHMETIC, folder)
    done = operator("submit", job_file(suite="./my sums"), "--dry-run")
    assert json.loads(done.stdout)["spec"]["suite"] == "my-sums@1"
    assert "suite my-sums@1: 384 cases" in done.stderr
    assert "no file or folder" in operator("submit", job_file(suite="./none"), code=2).stderr
    unknown = operator("submit", job_file(suite="none"), code=1)
    assert "dressage suites push" in unknown.stderr.replace("\n", " ")


def test_the_version_is_printed(dressage):
    assert dressage("--version").stdout.startswith("dressage ")


def test_what_came_of_a_job_is_shown_and_compared(operator, suite, worker, job_file):
    ids = [
        operator("submit", job_file(name="ok")).stdout.strip().splitlines()[-1] for _ in range(2)
    ]
    for job_id in ids:
        operator("watch", job_id)
    said = operator("show", ids[0]).stdout
    assert "succeeded" in said
    assert "adapter.tar" in said
    assert json.loads(operator("show", ids[0], "--json").stdout)["id"] == ids[0]
    assert {one["id"] for one in json.loads(operator("jobs", "--json").stdout)["items"]} >= {*ids}
    assert "items" in json.loads(operator("queue", "--json").stdout)
    assert json.loads(operator("workers", "--json").stdout)[0]["id"] == "test-worker"
    assert json.loads(operator("suites", "list", "--json").stdout)["items"]
    assert "metric" in operator("metrics", ids[0]).stdout
    assert operator("metrics", ids[0], "--csv").stdout.startswith("step,time")
    assert isinstance(json.loads(operator("metrics", ids[0], "--json").stdout)["items"], list)
    assert isinstance(json.loads(operator("rollouts", ids[0], "--json").stdout), list)
    operator("logs", ids[0])
    assert "refused" in operator("compare", ids[0], "job_missing", code=1).stderr
    assert "name measures" in operator("regrade", ids[0], code=2).stderr


@pytest.mark.parametrize("template", ["tools", "world", "judge"])
def test_a_suite_of_ones_own_passes_its_check_and_its_tests(dressage, tmp_path, template):
    said = dressage("init", tmp_path / "mine", "--template", template)
    assert "dressage suites check" in said.stderr
    cases = next(line for line in said.stdout.splitlines() if line.endswith("cases.jsonl"))
    folder = os.path.dirname(cases)
    checked = dressage("suites", "check", folder)
    assert "cases" in checked.stdout
    assert "failed" not in checked.stdout
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path / "mine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "not an empty folder" in dressage("init", tmp_path / "mine", code=2).stderr


@pytest.mark.parametrize("template", ["tools", "world"])
def test_a_job_of_ones_own_is_accepted(operator, tmp_path, template):
    model = str(TINY_MODEL)
    where = tmp_path / f"my {template}"
    operator("init", where, "--template", template, "--model", model, "--gpus", 0)
    said = operator("submit", where / "job.json", "--dry-run")
    spec = json.loads(said.stdout)["spec"]
    assert (spec["name"], spec["agent"]["model"]) == (f"my {template}", model)


def test_a_check_says_what_is_wrong(dressage, tmp_path):
    assert "no file or folder" in dressage("suites", "check", tmp_path / "no", code=1).stderr
    (tmp_path / "cases.jsonl").write_text('{"input": "2 + 2?", "expect": {"answer": "4"}}\n')
    code = "from dressage.authoring import measure, pass_reason\n"
    (tmp_path / "suite.py").write_text(
        code
        + "@measure\ndef kind(context):\n    return pass_reason('always')\n"
        + "@measure\ndef broken(context):\n    return pass_reason(context.expect['sum'])\n"
    )
    said = dressage("suites", "check", tmp_path, code=1)
    assert "kind gives 1.00 to an agent that says: nothing" in said.stderr
    assert "broken fails: KeyError: 'sum'" in said.stderr
    (tmp_path / "suite.py").write_text("import nothing_that_is_there\n")
    assert "nothing_that_is_there" in dressage("suites", "check", tmp_path, code=1).stderr
    (tmp_path / "cases.jsonl").write_text('{"input": ""}\n')
    said = dressage("suites", "check", tmp_path, code=1).stderr
    assert "cases.jsonl 1: input: input is empty" in said


def test_fields_of_a_job_are_set_on_the_command_line(operator, suite, job_file):
    changes = ("--set", "training.seed=7", "--set", "name=other", "--set", "training.lora.r=2")
    spec = json.loads(operator("submit", job_file(), "--dry-run", *changes).stdout)["spec"]
    assert (spec["training"]["seed"], spec["name"], spec["training"]["lora"]["r"]) == (
        7,
        "other",
        2,
    )
    for wrong, text in (("training.seed", "is not field=value"), ("name.x=1", "has no fields")):
        assert text in operator("submit", job_file(), "--set", wrong, code=2).stderr
    said = operator("submit", job_file(), "--set", "training.sed=7", code=1).stderr
    assert "training.sed" in said


def test_a_sweep_is_submitted_and_shown(operator, suite, job_file):
    grid = ("--grid", "training.seed=0,1", "--grid", "training.learning_rate=1e-3,2e-3")
    sweep = operator("sweep", "submit", job_file(), *grid).stdout.strip()
    assert "training.learning_rate=0.001" in operator("sweep", "table", sweep).stdout
    arms = json.loads(operator("sweep", "table", sweep, "--json").stdout)["arms"]
    assert [len(arm["jobs"]) for arm in arms] == [2, 2]
    assert (
        "is not field=value"
        in operator("sweep", "submit", job_file(), "--grid", "x", code=2).stderr
    )


def test_an_agent_is_asked_on_the_command_line(operator, suite, worker, job_file):
    job_id = operator("submit", job_file(name="ok")).stdout.strip().splitlines()[-1]
    operator("watch", job_id)
    said = operator("generate", job_id, "What is 6 * 7?")
    assert said.stdout.strip()
    answer = json.loads(operator("generate", job_id, "What is 6 * 7?", "--json").stdout)
    assert answer["status"] == "succeeded"
    assert "refused" in operator("generate", "job_missing", "x", code=1).stderr


def test_the_doctor_says_what_is_here_and_what_to_do(operator, dressage, monkeypatch):
    for name in ("HUB", "OLLAMA"):  # nobody outside is asked
        monkeypatch.setattr(f"dressage.cli.doctor.{name}", "http://127.0.0.1:9")
    found = {one["what"]: one for one in json.loads(operator("doctor", "--json", code=1).stdout)}
    assert found["Python"]["state"] == "ok"
    assert found["torch"]["state"] == "ok"
    assert found["vllm"]["fix"].startswith("training.vllm needs it")
    assert found["service: database"]["state"] == "ok"
    assert found["service: scheduler"]["state"] == "wrong"  # none runs here
    said = dressage("doctor", "--url", "http://127.0.0.1:9").stdout
    assert "nothing answers at http://127.0.0.1:9" in said
    assert "dressage up" in said


def test_a_model_is_measured_on_the_command_line(operator, suite, worker, job_file):
    said = operator("evaluate", job_file(name="ok"), "--set", "evaluation.temperature=0").stdout
    job_id = said.split()[0]
    spec = json.loads(operator("show", job_id, "--json").stdout)["spec"]
    assert (spec["evaluation"]["only"], spec["evaluation"]["temperature"]) == (True, 0)
    assert spec["exports"] == []


def test_what_is_shown_is_json_for_programs(operator, suite, worker, job_file):
    job = json.loads(operator("submit", job_file(name="steps 30"), "--json").stdout)
    show = ("show", job["id"], "--json")
    wait_for(lambda: json.loads(operator(*show).stdout)["status"] == "training")
    for command in (
        ("pause", job["id"]),
        ("cancel", job["id"]),
        ("suites", "push", ARITHMETIC, "--name", "again"),
        ("suites", "list"),
        ("jobs",),
        ("queue",),
        ("workers",),
        ("drain", "test-worker"),
        ("activate", "test-worker"),
        ("usage",),
        ("audit",),
        ("keys", "list"),
        ("teams", "list"),
        ("teams", "set", "default", "--max-queued-jobs", 100),
        ("metrics", job["id"]),
        ("rollouts", job["id"]),
    ):
        assert json.loads(operator(*command, "--json").stdout) is not None, command
