"""One process that answers the calls of one socket, a JSON request a line."""

import asyncio
import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

from pydantic import TypeAdapter
from pydantic_core import to_json

from dressage.authoring.environment import Environment, EnvironmentCase
from dressage.authoring.errors import MeasureTypeError, ScoreRangeError, ToolArgumentsError
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.authoring.tool import function_tool
from dressage.sandbox.builtin import MissingExpectation, evaluate
from dressage.sandbox.loading import Code
from dressage.spec.chat import Message
from dressage.spec.measure import BuiltinMeasure

MAX_REASON = 2000
BUILTIN: TypeAdapter[BuiltinMeasure] = TypeAdapter(BuiltinMeasure)


class Worker:
    """Answers the calls of one socket."""

    def __init__(self, code: Code, connection: socket.socket) -> None:
        self._code, self._connection = code, connection
        self._environment: Environment | None = None
        self._id = ""  # of the call that is being answered
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
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
            try:
                value = self._loop.run_until_complete(self._answer(request))
                self._send({"value": value})
            except MissingExpectation as error:
                self._send({"error": "missing_expectation", "message": str(error)})
            except ToolArgumentsError as error:
                self._send({"error": "arguments", "message": str(error)})
            except MeasureTypeError as error:
                self._send({"error": "wrong_type", "message": str(error)})
            except ScoreRangeError as error:
                self._send({"error": "out_of_range", "message": str(error)})
            except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything
                message = f"{type(error).__name__}: {error}"[:2000]
                self._send({"error": "raised", "message": message})

    def _send(self, content: dict[str, Any]) -> None:
        send(self._connection, {**content, "id": self._id})

    async def _answer(self, request: dict[str, Any]) -> Any:
        call = request["call"]
        if call == "tool":
            tool = (
                function_tool(getattr(self._environment, request["name"]))
                if self._environment
                else self._code.tools[request["name"]]
            )
            return as_text(await tool.invoke(request["arguments"]), request["max_output"])
        if call == "measure":
            context = _context(request["context"], self._environment)
            verdict = await self._code.measures[request["name"]].evaluate(context)
            return {"value": verdict.value, "reason": cut(str(verdict.reason))}
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
            return await rewards.evaluate(
                request["prompts"], request["completions"], request["columns"]
            )
        if call == "rollout_func":
            function = self._code.rollout_funcs[request["name"]]
            return await function.play(request["prompts"], _AskedModel(self._ask))
        if call == "open":
            self._environment = self._code.environments[request["name"]]()
            text = await _maybe(self._environment.reset(EnvironmentCase(**request["case"])))
            return None if text is None else as_text(text, request["max_output"])
        if self._environment:
            await _maybe(self._environment.close())
        return None

    def _ask(self, question: dict[str, Any]) -> Any:
        self._send({"question": question})
        return self._requests.get()["reply"]


class _AskedModel:
    """A `PolicyModel` whose work is done by the host."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._ask = ask

    def encode(self, messages: list[Message]) -> list[int]:
        ids: list[int] = self._ask({"ask": "encode", "messages": messages})
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


async def _maybe(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


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


def _context(data: dict[str, Any], environment: Environment | None) -> MeasureContext:
    return MeasureContext(
        **{
            **data,
            "final": AssistantMessage(data["final"]),
            "tool_calls": [ToolCall(**call) for call in data["tool_calls"]],
            "environment": environment,
        }
    )
