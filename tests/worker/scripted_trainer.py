"""A stand-in for the training process: does what the job's name says, in milliseconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dressage.spec.artifact import ArtifactKind
from dressage.spec.event import EventType
from dressage.spec.status import Reason
from worker.training.run_dir import Manifest, RunDirectory


def main():
    run = RunDirectory(Path(sys.argv[1]))
    spec = json.loads((run.path / "spec.json").read_text())
    script = spec["job"]["name"]
    run.emit(EventType.STATUS, status="preparing")
    run.emit(EventType.STATUS, status="training")
    run.emit(EventType.PROGRESS, step=1, total_steps=2)
    if script == "environment":
        run.emit(EventType.LOG, level="info", message=json.dumps(dict(os.environ)))
    if script == "torn line":
        with (run.path / "events.jsonl").open("ab") as events:
            events.write(b"this is no event\n")
            events.write(b'{"type": "log", "data": {"message": "cut')
            events.flush()
            os.fsync(events.fileno())
    if script == "segfault":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if script == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if script == "user error":
        run.fail(Reason.USER_CODE_ERROR, "your measure is broken")
        return 1
    if script in ("hang", "hang stubbornly"):
        if script == "hang stubbornly":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "876.5"])
        run.emit(EventType.LOG, level="info", message=f"pid {os.getpid()}")
        time.sleep(1000)
    if script == "pausable":
        while not run.pause_requested:
            time.sleep(0.02)
        run.fail(Reason.PAUSED_BY_USER, "set aside at step 1")
        return 1
    if script == "deaf to pauses":
        while not run.pause_requested:
            time.sleep(0.02)
    if script == "flood":
        for n in range(20_000):
            run.emit(EventType.LOG, level="info", message=str(n))
    run.emit(EventType.STATUS, status="evaluating")
    folder = run.path / "final"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 1000)
    os.utime(folder / "weights", (0, 0))  # two runs make the same file
    file = run.pack(folder, ArtifactKind.ADAPTER)
    if script == "corrupt":
        file = file.model_copy(update={"sha256": "0" * 64})
    run.finish(Manifest(files=(file,), result={"final_loss": 0.5}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
