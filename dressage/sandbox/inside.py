"""The fork server that holds user code: `python -m dressage.sandbox.inside CONFINEMENT`.

It confines itself, then loads the code and says what is in it. For each socket it is then sent over
its standard input it forks a worker, which answers one JSON request a line on that socket: forking
is cheap where importing is not, so every environment can have a process to itself. What user code
prints goes nowhere.
"""

import asyncio
import contextlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dressage.authoring.environment import Environment, EnvironmentCase
from dressage.authoring.errors import MeasureTypeError, ScoreRangeError, ToolArgumentsError
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.authoring.tool import function_tool
from dressage.sandbox import landlock
from dressage.sandbox.loading import Code, CodeError, load_code
from dressage.spec.chat import Message

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def main() -> None:
    """Load, announce, fork."""
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    confinement = Confinement(**json.loads(sys.argv[1]))
    confine(confinement)
    try:
        code = load_code(Path(confinement.folder))
    except CodeError as error:
        _send(control, {"error": "code", "message": str(error)})
        return
    _send(control, code.contents())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return  # the host is gone
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # its own group: whatever it starts ends with it
            _Worker(code, socket.socket(fileno=descriptors[0])).serve()
        os.close(descriptors[0])


class _Worker:
    """Answers the calls of one socket."""

    def __init__(self, code: Code, connection: socket.socket) -> None:
        self._code, self._connection = code, connection
        self._environment: Environment | None = None
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        # One loop for all calls: an environment may keep connections open between them.
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Answer calls until the host closes the socket."""
        _send(self._connection, {"ready": True})
        lines = self._connection.makefile("r", encoding="utf-8")
        threading.Thread(target=_read, args=(lines, self._requests), daemon=True).start()
        while True:
            request = self._requests.get()
            try:
                value = self._loop.run_until_complete(self._answer(request))
                _send(self._connection, {"value": value})
            except ToolArgumentsError as error:
                _send(self._connection, {"error": "arguments", "message": str(error)})
            except MeasureTypeError as error:
                _send(self._connection, {"error": "wrong_type", "message": str(error)})
            except ScoreRangeError as error:
                _send(self._connection, {"error": "out_of_range", "message": str(error)})
            except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything
                message = f"{type(error).__name__}: {error}"[:2000]
                _send(self._connection, {"error": "raised", "message": message})

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
            return {"value": verdict.value, "reason": str(verdict.reason)}
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
        _send(self._connection, {"question": question})
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


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(content).encode() + b"\n")


async def _maybe(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


@dataclass(frozen=True)
class Confinement:
    """What the processes give up before they load user code.

    Attributes:
        folder: The suite's code.
        work: Where they may write.
        memory: Bytes of address space, each.
        file_size: Bytes of one written file.
        processes: How many processes and threads their user may have.
        user: The user id to take; None: stay.
        landlock: Paths they may read, when the kernel is to hold them to it; None: no Landlock.
        network: Whether they may use the network.
    """

    folder: str
    work: str
    memory: int
    file_size: int
    processes: int
    user: int | None
    landlock: list[str] | None
    network: bool


def confine(to: Confinement) -> None:
    """Give everything up."""
    if to.user is not None:
        os.setgroups([])
        os.setgid(to.user)
        os.setuid(to.user)
    os.chdir(to.work)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (to.file_size, to.file_size))
    resource.setrlimit(resource.RLIMIT_AS, (to.memory, to.memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (to.processes, to.processes))
    if to.landlock is not None:
        landlock.restrict(
            read=[*to.landlock, to.folder],
            write=[to.work, *DEVICES],
            network=to.network,
        )


def as_text(value: Any, limit: int) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[truncated: {len(text) - limit} more characters]"


def _context(data: dict[str, Any], environment: Environment | None) -> MeasureContext:
    return MeasureContext(
        **{
            **data,
            "final": AssistantMessage(data["final"]),
            "tool_calls": [ToolCall(**call) for call in data["tool_calls"]],
            "environment": environment,
        }
    )


if __name__ == "__main__":
    main()
