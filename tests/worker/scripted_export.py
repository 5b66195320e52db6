"""A stand-in for the export process: makes a file, and fails or not as the job's name says."""

import json
import sys
import tarfile
from pathlib import Path

from dressage.spec.artifact import ArtifactKind
from dressage.spec.status import Reason
from worker.training.process.boundary import run_process
from worker.wire.run_dir import FailureFile, Manifest

ANSWER = {
    "answer": "It is 42.",
    "messages": [],
    "stop_reason": "stop",
    "prompt_tokens": 1,
    "completion_tokens": 1,
}


def play(run):
    spec = json.loads((run.path / "spec.json").read_text())
    if spec["export"]["type"] == "generation":
        run.finish(Manifest(files=(), result=ANSWER))
        return
    (run.artifacts / "model-q8_0.gguf").write_bytes(b"GGUF")
    failure = None
    if spec["job"]["name"] == "ok, but Ollama is away":
        failure = FailureFile(reason=Reason.OLLAMA_UNAVAILABLE, message="does not answer")
    if spec["job"]["name"] == "ok, but Ollama refuses":
        failure = FailureFile(reason=Reason.OLLAMA_REFUSED, message="the name is taken")
    file = run.describe("model-q8_0.gguf", ArtifactKind.GGUF)
    with tarfile.open(run.path / "input.tar") as archive:
        trained = archive.getnames()
    registration = {
        "server": spec["ollama_url"],
        "name": "x",
        "digest": "y",
        "parameters": {"trained": trained},
    }
    run.finish(Manifest(files=(file,), result={"ollama": registration}, failure=failure))


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), play))
