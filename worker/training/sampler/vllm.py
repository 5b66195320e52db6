"""A sampler whose engine lives in a process of its own, on the same card.

The process dies with this one, and this one does not wait for ever: an engine that has ended, or
has not been heard of for a while, is a failure with a reason.
"""

import asyncio
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.multiprocessing  # noqa: F401  lets tensors cross: where they lie, not what they hold

from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.training.sampler.engine_process import (
    Answers,
    Ask,
    Attach,
    Beat,
    Broken,
    Done,
    DropAll,
    EngineOptions,
    Score,
    Sleep,
    Write,
    serve,
)
from worker.training.sampler.hand_over import Source
from worker.training.sampler.protocol import Sampled, Turn

log = logging.getLogger(__name__)

ENGINE = "worker.training.sampler.vllm_engine:VllmEngine"
LOAD_SECONDS = 900.0  # with a model that is compiled for the first time
SILENT_SECONDS = 45.0  # while something is asked
Waiting = tuple[asyncio.Future[Sampled], asyncio.AbstractEventLoop]


class VllmSampler:
    """Starts an engine and asks it, from any event loop and any thread.

    Args:
        options: Of the engine.
        factory: Which engine: `module:callable`.
        silent_seconds: How long it may say nothing while it is asked something.

    Raises:
        RunFailure: It does not load.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        factory: str = ENGINE,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.end_ids = frozenset(options.end_ids)
        self.version = 0
        self.passes = 0  # of the engine, one token for everybody each, as far as it has said
        self._silent_seconds = LOAD_SECONDS
        self._lock = threading.Lock()  # of everything below
        self._sending = threading.Lock()
        self._numbers = 0
        self._waiting: dict[int, Waiting] = {}
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._asked = 1  # it says when it is loaded
        self._heard = time.monotonic()
        self._failure: RunFailure | None = None
        self._closing = False
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, factory, options, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._read, name="engine", daemon=True).start()
        self._answer()
        self._silent_seconds = silent_seconds

    async def sample(self, turn: Turn) -> Sampled:
        """As for `Sampler`."""
        number, future = self._number()
        self._send(Ask(number, turn))
        return await future

    async def score(self, ids: list[int]) -> list[float]:
        """The log-probability of each token after the first, at temperature 1."""
        number, future = self._number()
        self._send(Score(number, ids))
        return (await future).logps

    def join(self, players: int = 1) -> None:
        """As for `Sampler`: whoever asks joins the running batch, and nobody is waited for."""

    def leave(self, players: int = 1) -> None:
        """As for `Sampler`."""

    def attach(self, sources: Sequence[Source]) -> None:
        """Say where the trainer's weights lie.

        Raises:
            RunFailure: The engine has no place for some of them.
        """
        self._ask(Attach(list(sources)))

    def load_weights(self, version: int) -> None:
        """Have the trainer's weights taken in, between two tokens of whatever is being written."""
        self._ask(Write(version))
        self.version = version

    def sleep(self) -> None:
        """Give the card's memory back until `wake`; nothing may be asked meanwhile."""
        self._ask(Sleep())

    def wake(self) -> None:
        """Take it again. The weights must be loaded anew."""
        self._ask(Sleep(wake=True))

    def drop_all(self) -> None:
        """Let go of everything that is being written."""
        with self._lock:
            self._waiting.clear()
        self._send(DropAll())

    def close(self) -> None:
        """End the engine."""
        self._closing = True
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._process.pid

    def _number(self) -> tuple[int, "asyncio.Future[Sampled]"]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sampled] = loop.create_future()
        with self._lock:
            if not self._waiting:
                self._heard = time.monotonic()
            self._numbers += 1
            self._waiting[self._numbers] = (future, loop)
            return self._numbers, future

    def _ask(self, message: Any) -> None:
        with self._lock:
            self._asked += 1
            self._heard = time.monotonic()
        self._send(message)
        self._answer()

    def _answer(self) -> None:
        done = self._done.get()
        if done.problem is not None:
            raise self._failure or RunFailure(Reason.MODEL_UNSUPPORTED, _unplaced(done.problem))

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self._failed("its process has ended")
        if self._failure:
            raise self._failure

    def _read(self) -> None:
        """In a thread: hand out what the engine says, and notice when it says nothing."""
        while not self._closing:
            try:
                if self._connection.poll(0.5):
                    self._take(self._connection.recv())
                    continue
            except (EOFError, OSError):
                self._failed(f"its process has ended (exit code {self._exit_code()})")
                return
            with self._lock:
                asked = bool(self._waiting) or self._asked > 0
                silent = time.monotonic() - self._heard
            if asked and silent > self._silent_seconds:
                self._failed(f"it has said nothing for {silent:.0f} seconds")
                return

    def _exit_code(self) -> int | None:
        self._process.join(5)
        return self._process.exitcode

    def _take(self, message: Any) -> None:
        with self._lock:
            self._heard = time.monotonic()
        if isinstance(message, Beat):
            self.passes = message.steps
        elif isinstance(message, Answers):
            for number, sampled in message.sampled:
                with self._lock:
                    future, loop = self._waiting.pop(number, (None, None))
                if future and loop:
                    _tell(loop, future, sampled)
        elif isinstance(message, Broken):
            self._failed(message.problem)
        elif isinstance(message, Done):
            with self._lock:
                self._asked -= 1
            self._done.put(message)

    def _failed(self, how: str) -> None:
        """Everybody who waits, and whoever asks later, is told; nothing is left on the card."""
        with self._lock:
            if self._failure or self._closing:
                return
            self._failure = RunFailure(
                Reason.SAMPLER_FAILED, f"the engine that samples has failed: {how}"
            )
            waiting, self._waiting = self._waiting, {}
            asked, self._asked = self._asked, 0
        log.error("%s", self._failure.message)
        self._process.kill()
        for future, loop in waiting.values():
            _tell(loop, future, self._failure)
        for _ in range(asked):
            self._done.put(Done(problem=how))


def _tell(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Sampled]", what: Sampled | RunFailure
) -> None:
    def tell() -> None:
        if future.done():
            return
        if isinstance(what, RunFailure):
            future.set_exception(what)
        else:
            future.set_result(what)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop has ended: nobody waits any more
        log.debug("an answer of the engine came after its question was given up")


def _unplaced(names: str) -> str:
    return f"vLLM's model has no place for trained weights of this one: {names}"
