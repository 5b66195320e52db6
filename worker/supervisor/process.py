"""A run as a child process in its own group, without any secret of the service."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "DRESSAGE_JUDGE_KEY",
)
KEPT_PREFIXES = ("HF_", "WANDB_", "TORCH", "OMP_", "NCCL_", "CUDA_", "NVIDIA_", "LLAMA_CPP_")
GRACE_SECONDS = 5.0


class ChildProcess:
    """`python -m MODULE RUN_DIR`; its output goes to `output.log` in the run directory."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, module: str, run: Path, *, gpu_indexes: Sequence[int] = ()
    ) -> "ChildProcess":
        """Start it, able to see these GPUs of the worker and no other one."""
        with (run / "output.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(run)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(gpu_indexes),
                start_new_session=True,
            )
        return cls(process)

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

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


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
    }


def _devices(gpu_indexes: Sequence[int]) -> str:
    """Names of GPUs that the worker counts from 0, among those that it sees itself."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return ",".join(names[index] if names else str(index) for index in gpu_indexes)
