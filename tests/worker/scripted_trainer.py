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
from worker.training.process.boundary import run_process
from worker.training.process.failures import RunFailure
from worker.wire.checkpoints import keep, mark_complete, newest_complete, step_of
from worker.wire.run_dir import Manifest

STEP_SECONDS = 0.1


def take_steps(run, spec, count):
    """Steps that go on where an earlier attempt has stopped, pause when asked, and are counted."""
    earlier = [Path(path) for path in spec["previous"]]
    checkpoint = newest_complete(earlier, up_to=spec["up_to_step"])
    first = step_of(checkpoint) if checkpoint else 0
    for step in range(first + 1, count + 1):
        time.sleep(STEP_SECONDS)
        run.emit(EventType.PROGRESS, step=step, total_steps=count, seconds_per_step=STEP_SECONDS)
        run.emit(EventType.METRICS, step=step, values={"reward": step / count})
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"w" * step)
        (checkpoint / "optimizer.pt").write_bytes(b"o" * 1000)
        mark_complete(checkpoint)
        run.emit(EventType.CHECKPOINT, step=step, name=checkpoint.name)
        kept = spec["job"]["training"]["keep_checkpoints"]
        if kept:
            keep(run, checkpoint, ArtifactKind.ADAPTER, count=kept)
        if run.pause_requested and step < count:
            raise RunFailure(Reason.PAUSED_BY_USER, f"set aside at step {step}")


def play(run):
    spec = json.loads((run.path / "spec.json").read_text())
    script = spec["job"]["name"]
    run.emit(EventType.STATUS, status="preparing")
    run.emit(EventType.STATUS, status="training")
    if not script.startswith("steps"):
        run.emit(EventType.PROGRESS, step=1, total_steps=2)
    if script.startswith("steps"):
        take_steps(run, spec, int(script.split()[1]))
    if script.endswith("then fails"):
        raise RunFailure(Reason.USER_CODE_ERROR, "your measure is broken")
    if script == "stalls":
        run.emit(EventType.LOG, level="info", message="still here")
        time.sleep(1000)
    if script == "gpu is broken":
        raise RunFailure(Reason.GPU_FAILED, "CUDA error: uncorrectable ECC error")
    if script == "memory is full at 8" and spec["job"]["training"]["batch_size"] == 8:
        raise RunFailure(Reason.OUT_OF_MEMORY, "the memory of the device is full")
    if script == "disk is full":
        with (run.path / "big").open("wb") as file:
            while True:
                file.write(b"0" * 65536)
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
        raise RunFailure(Reason.USER_CODE_ERROR, "your measure is broken")
    if script in ("hang", "hang stubbornly"):
        if script == "hang stubbornly":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # It outlives us unless the whole group is ended.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)", str(run.path)])
        run.emit(EventType.LOG, level="info", message=f"pid {os.getpid()}")
        time.sleep(1000)
    if script == "pausable":
        while not run.pause_requested:
            time.sleep(0.02)
        raise RunFailure(Reason.PAUSED_BY_USER, "set aside at step 1")
    if script == "deaf to pauses":
        while not run.pause_requested:
            time.sleep(0.02)
    if script == "flood":
        for n in range(100_000):
            run.emit(EventType.LOG, level="info", message=str(n))
    if script == "never silent":
        while True:
            run.emit(EventType.LOG, level="info", message="on and on")
    run.emit(EventType.STATUS, status="evaluating")
    folder = run.path / "final"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 1000)
    os.utime(folder / "weights", (0, 0))  # two runs make the same file
    file = run.pack(folder, ArtifactKind.ADAPTER)
    if script == "corrupt":
        file = file.model_copy(update={"sha256": "0" * 64})
    run.finish(Manifest(files=(file,), result={"final_loss": 0.5}))


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), play))
