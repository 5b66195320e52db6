"""What a child that does not get on is doing: the stacks of its threads."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from worker.wire.run_dir import STACKS

WAIT_SECONDS = 1.0
MAX_CHARACTERS = 20_000


async def dump_stacks(run: Path) -> str:
    """Ask every process of a run for its stacks; each has made its file when it began."""
    files = sorted(run.glob(STACKS.format(pid="*")))
    for file in files:
        pid = int(file.stem.rsplit("-", 1)[-1])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    await asyncio.sleep(WAIT_SECONDS)
    texts = [file.read_text(errors="replace") for file in files if file.is_file()]
    return "\n\n".join(texts)[-MAX_CHARACTERS:] or "none: the process does not answer"
