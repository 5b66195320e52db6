"""The main job, end to end: start the service, train, prove the gain, download, run the GGUF."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from dressage.cli.watching import watch_job
from dressage.client import Client
from dressage.client.config import stored_key
from dressage.spec.artifact import ArtifactKind
from dressage.spec.status import JobStatus
from worker.training.export.gguf import GgufModel

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "arithmetic"
sys.path.insert(0, str(EXAMPLE))

from tools import calculate  # noqa: E402  the example's own tool answers the GGUF's calls

GGUF_CASES = 8
console = Console()


def main():
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dressage-demo-") as folder:
        Path(folder).chmod(0o711)  # as root the databases run as another user
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key of a service that soon is gone
        stack = subprocess.Popen(
            [ROOT / ".venv/bin/dressage", "up", "--data-dir", f"{folder}/data", "--port", str(port)]
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(url, stack)
            with Client(url) as client:
                return run(client, Path(folder) / "files")
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(60)


def run(client, files):
    suite = client.push_suite(EXAMPLE, "arithmetic")
    console.print(f"suite {suite.reference}: {suite.case_count} cases", highlight=False)
    spec = json.loads((EXAMPLE / "job.json").read_text())
    spec["agent"]["model"] = str((EXAMPLE / spec["agent"]["model"]).resolve())
    started = time.monotonic()
    job = watch_job(client, client.submit(spec).id, console)
    seconds = time.monotonic() - started
    if job.status is not JobStatus.SUCCEEDED or any(e.status != "succeeded" for e in job.exports):
        console.print(f"demo: the job has {job.status}: {job.message}")
        return 1

    sizes = {}
    for artifact in client.artifacts(job.id):
        path = client.download(job.id, artifact, files)
        sizes[artifact.kind] = artifact.size / 1e6
        if artifact.kind is ArtifactKind.GGUF:
            gguf = path
    right, answered = ask(gguf, client, job, suite)

    gain = client.evaluations(job.id).gain
    console.print(f"GGUF: {right} of {GGUF_CASES} held-out cases right", highlight=False)
    console.print(f"docs: {client.url}/docs (while the service runs; start it with `dressage up`)")
    console.print(
        f"demo: held-out pass rate {gain.before:.2f} -> {gain.after:.2f} (n={gain.count}, 95% "
        f"interval of the gain {gain.low:+.2f}..{gain.high:+.2f}), adapter "
        f"{sizes[ArtifactKind.ADAPTER]:.1f} MB, GGUF {sizes[ArtifactKind.GGUF]:.1f} MB, "
        f"{seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if gain.low > 0 and answered == GGUF_CASES else 1


def ask(gguf, client, job, suite):
    """Put held-out cases to the GGUF file, with the tool at hand, as a server would."""
    model = GgufModel(gguf, context_length=1024)
    tools = [calculate.schema]
    expected = expectations(client, suite)
    right = answered = 0
    for rollout in client.rollouts(job.id, phase="after", limit=GGUF_CASES).items:
        messages = [m for m in rollout.messages if m["role"] in ("system", "user")]
        question = messages[-1]["content"]
        answer = model.chat(messages, tools, max_tokens=80)
        answered += bool(answer.get("content") or answer.get("tool_calls"))
        if answer.get("tool_calls"):
            messages.append(answer)
            for call in answer["tool_calls"]:
                messages.append(tool_message(call))
            answer = model.chat(messages, tools, max_tokens=80)
        text = (answer.get("content") or "").strip()
        right += text == f"The answer is {expected[rollout.case_id]}."
        console.print(f"  {question}  [dim]→[/dim]  {text or answer}", highlight=False)
    return right, answered


def tool_message(call):
    function = call["function"]
    try:
        content = calculate(**json.loads(function["arguments"]))
    except Exception as error:  # noqa: BLE001  what the model wrote may be anything
        content = json.dumps({"error": str(error)})
    return {"role": "tool", "tool_call_id": call.get("id"), "name": "calculate", "content": content}


def expectations(client, suite):
    expected, cursor = {}, None
    while True:
        page = client.cases(suite.reference, cursor=cursor)
        expected |= {case.id: case.expect["answer"] for case in page.items}
        cursor = page.next_cursor
        if cursor is None:
            return expected


def wait_until_up(url, stack):
    while stored_key(url) is None:  # kept when everything is up
        if stack.poll() is not None:
            sys.exit("demo: the service did not start")
        time.sleep(0.3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
