"""The process that holds user code: `python -m dressage.sandbox.inside FOLDER`.

One JSON request a line on standard input, one JSON answer a line on standard output. What user code
prints goes nowhere.
"""

import asyncio
import json
import os
import queue
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from dressage.authoring.errors import ToolArgumentsError
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.sandbox.loading import CodeError, load_code


def main() -> None:
    """Load the code, say what is in it, then answer calls until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    set_limits(memory=int(sys.argv[2]), file_size=int(sys.argv[3]))

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        tools, measures = load_code(Path(sys.argv[1]))
    except CodeError as error:
        answer({"error": "code", "message": str(error)})
        return
    answer(
        {
            "tools": [tool.schema["function"] for tool in tools.values()],
            "measures": sorted(measures),
        }
    )

    waiting: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    while True:
        request = waiting.get()
        try:
            if request["call"] == "tool":
                value = asyncio.run(tools[request["name"]].invoke(request["arguments"]))
                answer({"value": as_text(value, request["max_output"])})
            else:
                verdict = asyncio.run(
                    measures[request["name"]].evaluate(context_from(request["context"]))
                )
                answer({"value": {"value": verdict.value, "reason": str(verdict.reason)}})
        except ToolArgumentsError as error:
            answer({"error": "arguments", "message": str(error)})
        except (Exception, SystemExit) as error:  # noqa: BLE001  a foreign function may raise anything
            answer({"error": "raised", "message": f"{type(error).__name__}: {error}"[:2000]})


def _read(requests: Any, waiting: "queue.Queue[dict[str, Any]]") -> None:
    for line in requests:
        waiting.put(json.loads(line))
    os._exit(0)  # the host is gone: end also in the middle of a call


def set_limits(*, memory: int, file_size: int) -> None:
    """Bytes of address space and bytes of one written file; no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def as_text(value: Any, limit: int) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[truncated: {len(text) - limit} more characters]"


def context_from(data: dict[str, Any]) -> MeasureContext:
    """Build the measure's argument from what crossed the pipe."""
    return MeasureContext(
        **{
            **data,
            "final": AssistantMessage(data["final"]),
            "tool_calls": [ToolCall(**call) for call in data["tool_calls"]],
        }
    )


if __name__ == "__main__":
    main()
