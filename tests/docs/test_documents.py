"""Every code block of every document is run: what it says is what a reader can do.

A block's fence says what it is:

- `bash`, `python`: a session of the document, against a live service with a scripted worker;
- `bash host`: starts servers or other programs; its programs, options and files must exist;
- `python FILE`, `jsonl FILE`: a file of a suite, which must upload;
- `json job`: must pass every check of `POST /jobs`; `json FIELD`: a field of a job;
- `text`: what is seen.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import psycopg
import pytest
import typer

from dressage.authoring import Suite
from dressage.cli.main import app
from dressage.spec.job import JobSpec
from tests.conftest import ROOT
from tests.scripted import context, service, submit, worker
from tests.servers import KEYS
from tests.waiting import wait_for

__all__ = ["context", "service", "submit", "worker"]  # fixtures

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]
)
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER_PROGRAMS = {"ollama", "vllm", "tar", "export", "celery", "git"}


def blocks(document, *languages):
    """Of these languages: what else the fence says, and the text."""
    found = [(fence.split(), text) for fence, text in FENCE.findall(document.read_text())]
    return [(" ".join(fence[1:]), text) for fence, text in found if fence and fence[0] in languages]


def named(document):
    return str(document.relative_to(ROOT))


def session(document, language):
    return [text for kind, text in blocks(document, language) if not kind]


@pytest.fixture
def place(tmp_path, service, submit, worker, api, database_url):
    """A folder like the repository's root, and an environment with a service and its key."""
    with psycopg.connect(database_url) as connection:  # as a scheduler that is there
        connection.execute(
            "INSERT INTO heartbeats VALUES ('scheduler', now() + interval '1 hour', '{}')"
        )
    for name in ("examples", "scripts", "bench", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "config").mkdir()
    environment = {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "DRESSAGE_API_KEY": KEYS["operator"],
        "DRESSAGE_URL": service,
        "COLUMNS": "200",
    }
    trained = submit("ok", exports=[{"type": "gguf"}])
    wait_for(lambda: api.get(f"/jobs/{trained}").json()["exports"][0]["status"] == "succeeded")
    key = api.post("/keys", json={"team": "default", "role": "viewer"}).json()["id"]
    words = {"WORKER_ID": worker.worker_id, "KEY_ID": key, "http://127.0.0.1:8400": service}

    def run(command, text):
        live = submit("ok", resources={"gpus": 1, "labels": ["elsewhere"]})
        for word, value in {**words, "LIVE_JOB_ID": live, "JOB_ID": trained}.items():
            text = text.replace(word, value)
        done = subprocess.run(
            [*command, text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr

    return run


@pytest.mark.parametrize(
    "document",
    [d for d in DOCUMENTS if session(d, "bash") and "examples" not in d.parts],
    ids=named,
)
def test_what_the_shell_is_told(document, place):
    place(["bash", "-euo", "pipefail", "-c"], "\n".join(session(document, "bash")))


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if session(d, "python")], ids=named)
def test_what_python_is_told(document, place):
    place([sys.executable, "-c"], "\n".join(session(document, "python")))


def files(document):
    return {kind: text for kind, text in blocks(document, "python", "jsonl") if kind}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if files(d)], ids=named)
def test_a_suite_that_is_shown_uploads(document, api, tmp_path):
    for name, text in files(document).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in {name.split("/")[0] for name in files(document)}:
        content = Suite.from_path(tmp_path / folder).to_archive()
        answer = api.post("/suites", params={"name": folder}, content=content)
        assert answer.status_code == 201, answer.text
        assert answer.json()["measures"]


JSON = [(d, kind, text) for d in DOCUMENTS for kind, text in blocks(d, "json")]


@pytest.mark.parametrize(
    ("document", "kind", "text"), JSON, ids=[f"{named(d)} {kind}" for d, kind, _ in JSON]
)
def test_a_specification_that_is_shown_is_accepted(document, kind, text, place, job_spec):
    shown = json.loads(text)
    if kind == "job":
        place(["bash", "-c"], f"echo {shlex.quote(text)} > job.json; dressage submit job.json")
    else:
        JobSpec.model_validate({**job_spec, kind: shown})


HOST = [
    (document, line)
    for document in DOCUMENTS
    for kind, text in blocks(document, "bash")
    if kind == "host"
    for line in text.replace("\\\n", " ").splitlines()
    if line.strip()
]


@pytest.mark.parametrize(("document", "line"), HOST, ids=[line[:40] for _, line in HOST])
def test_what_a_host_is_told_exists(document, line):
    words = shlex.split(line, comments=True)
    program = words[0].removeprefix(".venv/bin/")
    if program == "dressage":
        group, path = typer.main.get_command(app), words[1:]
        while getattr(group, "commands", None):
            group, path = group.commands[path[0]], path[1:]
        group.make_context(program, path)
    elif program == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    elif program == "python":
        assert any((folder / words[1]).is_file() for folder in (ROOT, document.parent))
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK)
    else:
        assert program in OTHER_PROGRAMS or shutil.which(program)


def test_every_block_says_what_it_is():
    known = {"bash", "python", "jsonl", "json", "text"}
    unknown = [
        (named(document), fence)
        for document in DOCUMENTS
        for fence, _ in FENCE.findall(document.read_text())
        if not fence or fence.split()[0] not in known
    ]
    assert unknown == []


def test_every_link_between_documents_leads_somewhere():
    broken = []
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", document.read_text())):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = document.parent / path if path else document
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
            if not target.exists() or (anchor and anchor not in anchors):
                broken.append((named(document), link))
    assert broken == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900
