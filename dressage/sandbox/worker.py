"""One process that answers the calls of one socket, a JSON request a line."""

import asyncio
import base64
import contextlib
import io
import json
import os
import pickle
import queue
import random
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from importlib import import_module
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, TextIO

from pydantic import TypeAdapter
from pydantic_core import to_json

from dressage.authoring.agents_sdk import SdkToolFailed
from dressage.authoring.environment import EnvironmentCase, reset
from dressage.authoring.errors import MeasureTypeError, ScoreRangeError, ToolArgumentsError
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.authoring.tool import function_tool
from dressage.sandbox.builtin import MissingExpectation, evaluate
from dressage.sandbox.loading import Code
from dressage.spec.chat import Message
from dressage.spec.measure import BuiltinMeasure

MAX_REASON, MAX_PRINTED = 2000, 2000
SANDBOXED = (
    " (in the sandbox a call writes below its own folder only, which `tempfile` uses; there is no "
    "shared memory, so no Queue, Pool or Lock of multiprocessing: threads and subprocesses work)"
)
BUILTIN: TypeAdapter[BuiltinMeasure] = TypeAdapter(BuiltinMeasure)


class Worker:
    """Answers the calls of one socket."""

    def __init__(self, code: Code, connection: socket.socket) -> None:
        self._code, self._connection = code, connection
        self._environment: Any = None
        self._id = ""  # of the call that is being answered
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        self._printed = _Printed()
        # One loop for all calls: an environment may keep connections open between them.
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Answer calls until the host closes the socket."""
        send(self._connection, {"ready": True})
        lines = self._connection.makefile("r", encoding="utf-8")
        threading.Thread(target=_read, args=(lines, self._requests), daemon=True).start()
        while True:
            request = self._requests.get()
            self._id = request["id"]
            _draw_from(request.get("seed"))
            sys.stdout = sys.stderr = self._printed = _Printed()
            try:
                value = self._answer(request)
                self._send({"value": value})
            except MissingExpectation as error:
                self._send({"error": "missing_expectation", "message": str(error)})
            except SdkToolFailed as error:
                self._send({"error": "raised", "message": str(error)[:2000]})
            except ToolArgumentsError as error:
                self._send({"error": "arguments", "message": str(error)})
            except MeasureTypeError as error:
                self._send({"error": "wrong_type", "message": str(error)})
            except ScoreRangeError as error:
                self._send({"error": "out_of_range", "message": str(error)})
            except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything
                message = f"{type(error).__name__}: {error}"[:2000]
                if isinstance(error, PermissionError):
                    message += SANDBOXED
                self._send({"error": "raised", "message": message})

    def _send(self, content: dict[str, Any]) -> None:
        printed = "" if "question" in content else self._printed.taken()
        if printed:
            content = {**content, "printed": printed}
        send(self._connection, {**content, "id": self._id})

    def _settled(self, value: Any) -> Any:
        """What an async function gives in the end; plain ones have run outside of the loop."""
        return self._loop.run_until_complete(_awaited(value)) if isawaitable(value) else value

    def _answer(self, request: dict[str, Any]) -> Any:
        call = request["call"]
        if call == "tool":
            tool = (
                function_tool(getattr(self._environment, request["name"]))
                if self._environment is not None
                else self._code.tools[request["name"]]
            )
            result = self._settled(tool.start(request["arguments"]))
            if isinstance(result, AsyncIterator):
                result = self._settled(_collected(result))
            return as_text(result, request["max_output"])
        if call == "measure":
            context = _context(request["context"], self._environment)
            measure = self._code.measures[request["name"]]
            verdict = measure.checked(self._settled(measure.function(context)))
            return {**asdict(verdict), "reason": cut(str(verdict.reason))}
        if call == "builtin":
            spec = BUILTIN.validate_python(request["measure"])
            return asdict(evaluate(spec, _context(request["context"], None)))
        if call == "render":
            # Only here: suites that are no templates need no Jinja.
            return import_module("dressage.sandbox.templates").render(
                request["template"], request["conversations"]
            )
        if call == "reward_function":
            rewards = self._code.reward_functions[request["name"]]
            metrics: dict[str, float] = {}
            given = _reward_arguments(request, metrics)
            found = self._settled(rewards.function(**given))
            checked = rewards.checked(found, len(request["completions"]))
            return {"rewards": checked, "metrics": metrics}
        if call == "snapshot":
            return base64.b64encode(pickle.dumps(self._environment)).decode()
        if call == "rollout_func":
            function = self._code.rollout_funcs[request["name"]]
            cases = (request["cases"],) if function.takes_cases else ()
            result = self._settled(
                function.function(request["prompts"], _AskedModel(self._ask), *cases)
            )
            return function.checked(result, request["prompts"])
        if call == "open":
            self._environment = self._code.environments[request["name"]]()
            text = self._settled(reset(self._environment, EnvironmentCase(**request["case"])))
            return None if text is None else as_text(text, request["max_output"])
        if self._environment is not None and hasattr(self._environment, "close"):
            self._settled(self._environment.close())
        return None

    def _ask(self, question: dict[str, Any]) -> Any:
        self._send({"question": question})
        return self._requests.get()["reply"]


class _AskedModel:
    """A `PolicyModel` whose work is done by the host."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._ask = ask

    def encode(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        ids: list[int] = self._ask({"ask": "encode", "messages": messages, "tools": tools})
        return ids

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._ask({"ask": "encode_text", "text": text})
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._ask({"ask": "decode", "ids": ids}))

    def generate(self, prompts: list[list[int]], max_tokens: int | None = None) -> list[list[int]]:
        ids: list[list[int]] = self._ask(
            {"ask": "generate", "prompts": prompts, "max_tokens": max_tokens}
        )
        return ids


def _read(lines: TextIO, waiting: "queue.Queue[dict[str, Any]]") -> None:
    for line in lines:
        waiting.put(json.loads(line))
    os._exit(0)  # the host is gone: end also in the middle of a call


def send(connection: socket.socket, content: dict[str, Any]) -> None:
    """One message; a host that is gone does not matter."""
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(content).encode() + b"\n")


async def _awaited(value: Any) -> Any:
    return await value


async def _collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def _draw_from(seed: int | None) -> None:
    """Begin the draws of user code again: the same call draws the same, in every process."""
    if seed is None:
        return
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class _Printed(io.TextIOBase):
    """What a call prints, up to a limit."""

    def __init__(self) -> None:
        self._text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self._text) <= MAX_PRINTED:
            self._text += text[: MAX_PRINTED + 1 - len(self._text)]
        return len(text)

    def taken(self) -> str:
        """All of it, once."""
        text, self._text = self._text, ""
        return cut(text[:MAX_PRINTED]).rstrip()


def _reward_arguments(request: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
    """Keywords as TRL has them; what is logged comes into `metrics`."""

    def log_metric(name: str, value: float) -> None:
        metrics[str(name)[:100]] = float(value)

    given = {**request["columns"], "log_metric": log_metric, "log_extra": lambda *_: None}
    names = ("prompts", "completions", "completion_ids")
    given |= {name: request[name] for name in names if name in request}
    given["trainer_state"] = SimpleNamespace(**request.get("trainer_state", {}))
    if "environments" in request:
        given["environments"] = [_environment_of(kept) for kept in request["environments"]]
    return given


def _environment_of(kept: dict[str, str] | None) -> Any:
    """An environment out of another process of this sandbox, as its rollout left it."""
    if kept is None:
        return None
    if "error" in kept:
        return _NotHandedOver(kept["error"])
    return pickle.loads(base64.b64decode(kept["content"]))


class _NotHandedOver:
    """In place of an environment that does not pickle: who looks at it is told."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"this environment could not be handed to a reward function ({self._why}); a measure "
            "sees it as context.environment"
        )


def cut(reason: str) -> str:
    """A reason of a length that is kept with every rollout."""
    text = reason.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} [truncated]"


def as_text(value: Any, limit: int) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON.

    Raises:
        ValueError: It has no form in JSON.
    """
    if isinstance(value, bytes):
        value = value.decode()
    if not isinstance(value, str):
        plain = json.loads(to_json(value, inf_nan_mode="strings", fallback=_of_arrays))
        value = json.dumps(plain, ensure_ascii=False)
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[truncated: {len(text) - limit} more characters]"


def _of_arrays(value: Any) -> Any:
    """What pydantic does not know: arrays of NumPy and their numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a tool returned {type(value).__name__}, which JSON has no form for")


def _context(data: dict[str, Any], environment: Any) -> MeasureContext:
    return MeasureContext(
        **{
            **data,
            "final": AssistantMessage(data["final"]),
            "tool_calls": [ToolCall(**call) for call in data["tool_calls"]],
            "environment": environment,
        }
    )
