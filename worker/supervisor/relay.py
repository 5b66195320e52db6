"""Reads the lines a run appends to its events file.

How far they are stored stands in the database, written with the events themselves: a commit whose
answer was lost is neither repeated nor skipped.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from app.lifecycle.jobs import EventDraft
from dressage.spec.event import EventType
from worker.wire.run_dir import EVENTS

MAX_BATCH_BYTES = 8 * 1024 * 1024


def has_more(run: Path, position: int) -> bool:
    """Whether anything stands in the file after a position."""
    path = run / EVENTS
    return path.is_file() and path.stat().st_size > position


def read_events(run: Path, position: int) -> tuple[list[EventDraft], int]:
    """Whole lines after a position, at most so many bytes, and the position after them."""
    path = run / EVENTS
    if not path.is_file():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        data = file.read(MAX_BATCH_BYTES)
        while data and b"\n" not in data and (more := file.read(MAX_BATCH_BYTES)):
            data += more  # one line longer than a batch
    whole = data[: data.rfind(b"\n") + 1]
    return [_draft(line) for line in whole.splitlines()], position + len(whole)


def _draft(line: bytes) -> EventDraft:
    try:
        content: dict[str, Any] = json.loads(line)
        return EventDraft(
            EventType(content["type"]), content["data"], datetime.fromisoformat(content["time"])
        )
    except (ValueError, KeyError, TypeError):
        text = line[:200].decode("utf-8", "replace").replace("\x00", "")
        return EventDraft(EventType.WARNING, {"message": f"a line could not be read: {text}"})
