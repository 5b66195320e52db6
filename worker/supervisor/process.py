"""A run as a child process in its own group, without any secret of the service."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dressage.sandbox.isolation import PROBE_PREFIX
from worker.supervisor.temporary import TemporaryFolder

KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "HOME",
    "LD_LIBRARY_PATH",
    "DRESSAGE_JUDGE_KEY",
    "DRESSAGE_OLLAMA_TOKEN",
    "DRESSAGE_OLLAMA_CA",
)
KEPT_PREFIXES = (
    PROBE_PREFIX,
    "HF_",
    "WANDB_",
    "TORCH",
    "OMP_",
    "NCCL_",
    "CUDA_",
    "NVIDIA_",
    "LLAMA_CPP_",
)
GRACE_SECONDS = 5.0
ROOT = Path(__file__).resolve().parents[2]


class ChildProcess:
    """`python -m MODULE RUN_DIR`; its output goes to `output.log` in the run directory."""

    def __init__(self, process: asyncio.subprocess.Process, temporary: TemporaryFolder) -> None:
        self._process, self._temporary = process, temporary
        self._kills_before = memory_kills()

    @classmethod
    async def start(
        cls, module: str, run: Path, *, gpu_indexes: Sequence[int] = ()
    ) -> "ChildProcess":
        """Start it, able to see these GPUs of the worker and no other one."""
        temporary = TemporaryFolder()
        with (run / "output.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(run)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # In an empty folder: a hub's name must not be found as a folder beside us.
                cwd=temporary.path,
                env={**_environment(gpu_indexes), "TMPDIR": str(temporary.path)},
                start_new_session=True,
            )
        return cls(process, temporary)

    @property
    def memory_was_full(self) -> bool:
        """Whether the system has killed processes for memory since the start."""
        return memory_kills() > self._kills_before

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self, seconds: float) -> bool:
        """Whether it ended within some seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        return self._process.returncode is not None

    async def kill(self) -> None:
        """End the whole group: ask, then force."""
        self._signal(signal.SIGTERM)
        if not await self.wait(GRACE_SECONDS):
            self._signal(signal.SIGKILL)
            await self._process.wait()
        self._signal(signal.SIGKILL)  # whatever it left behind
        await asyncio.to_thread(self._temporary.remove)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def memory_kills() -> int:
    """How many processes the kernel has killed for memory: on this host, or in this container."""
    counted = 0
    for file in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    counted += int(value)
    return counted


def _environment(gpu_indexes: Sequence[int]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES)
    }
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": _devices(gpu_indexes),
        "DRESSAGE_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }


def _devices(gpu_indexes: Sequence[int]) -> str:
    """Names of GPUs that the worker counts from 0, among those that it sees itself."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return ",".join(names[index] if names else str(index) for index in gpu_indexes)
