"""What a worker says of its host. `python -m worker.presence` prints how many jobs it can run."""

import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version

from app.broker.wake import Queue
from app.exports.checks import LLAMA_QUANTIZE
from app.settings import read_settings
from app.workers.repository import Presence
from worker.wire.programs import quantize_path

PACKAGES = ("dressage", "torch", "transformers", "trl", "peft", "vllm")
FIELDS = "--query-gpu=name,memory.total,driver_version"


def list_gpus() -> list[tuple[str, float, str]]:
    """Name, memory in GiB and driver of each GPU; torch stays out of this process."""
    try:
        done = subprocess.run(
            ["nvidia-smi", FIELDS, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    found = [(name, float(mebibytes) / 1024, driver) for name, mebibytes, driver in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else found[: len([v for v in visible.split(",") if v])]


def describe(queue: Queue, *, gpus: int | None, labels: list[str]) -> Presence:
    """This process. A number of GPUs that the operator gives is believed."""
    found = list_gpus()
    return Presence(
        hostname=socket.gethostname(),
        pid=os.getpid(),
        queue=queue,
        gpus=len(found) if gpus is None else gpus,
        gpu_type=found[0][0] if found else None,
        gpu_memory_gb=min(memory for _, memory, _ in found) if found else None,
        labels=labels,
        versions=_versions() | ({"driver": found[0][2]} if found else {}),
    )


def _versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known | ({LLAMA_QUANTIZE: "yes"} if quantize_path() else {})


if __name__ == "__main__":
    given = read_settings().gpus
    print(1 + (len(list_gpus()) if given is None else given))  # noqa: T201
