"""Reads the lines a run appends to its events file, and keeps the place."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from app.jobs.lifecycle import EventDraft
from dressage.spec.event import EventType
from worker.training.run_dir import EVENTS

MAX_BATCH_BYTES = 8 * 1024 * 1024


class EventTail:
    """Hands out whole lines, at most so many bytes at a time; `advance` makes it final."""

    def __init__(self, run: Path) -> None:
        self._path = run / EVENTS
        self._position = 0
        self._pending = 0

    def read(self) -> list[EventDraft]:
        """The next lines. Read again until `advance` is called."""
        self._pending = 0
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read(MAX_BATCH_BYTES)
            while data and b"\n" not in data and (more := file.read(MAX_BATCH_BYTES)):
                data += more  # one line longer than a batch
        whole = data[: data.rfind(b"\n") + 1]
        self._pending = len(whole)
        return [_draft(line) for line in whole.splitlines()]

    def advance(self) -> None:
        """What was read is stored."""
        self._position += self._pending


def _draft(line: bytes) -> EventDraft:
    try:
        content: dict[str, Any] = json.loads(line)
        return EventDraft(
            EventType(content["type"]), content["data"], datetime.fromisoformat(content["time"])
        )
    except (ValueError, KeyError, TypeError):
        text = line[:200].decode("utf-8", "replace").replace("\x00", "")
        return EventDraft(EventType.WARNING, {"message": f"a line could not be read: {text}"})
