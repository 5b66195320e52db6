"""The process of an engine: it samples, scores and takes weights in until its parent ends.

One loop: read what is asked, let the engine make one token for everybody, send what has ended. A
rollout's next turn joins the running batch, and new weights are taken in between two tokens.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from worker.training.sampler.hand_over import EngineWeights, Source, UnknownWeights
from worker.training.sampler.protocol import Sampled, Turn

BEAT_SECONDS = 1.0
IDLE_SECONDS = 0.5


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is loaded with.

    Attributes:
        model: Name or directory.
        dtype: Of its weights.
        end_ids: The tokens that end a turn.
        max_model_len: Tokens of prompt and completion.
        gpu_memory_utilization: Share of the card's memory that it may use.
        tensor_parallel_size: Cards.
        max_num_seqs: Rollouts that write at the same time.
        seed: Of draws that have none of their own.
        sleeps: Whether it will be asked to sleep.
    """

    model: str
    dtype: str
    end_ids: tuple[int, ...]
    max_model_len: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    max_num_seqs: int
    seed: int
    sleeps: bool = False


@dataclass(frozen=True)
class Finished:
    """A continuation that has ended."""

    number: int
    ids: list[int]
    logps: list[float]


class Engine(Protocol):
    """What the loop needs of an engine. It is made of `EngineOptions`."""

    def add(self, number: int, turn: Turn) -> None:
        """Begin a continuation."""

    def step(self) -> list[Finished]:
        """One token for everybody; what has ended."""

    def drop_all(self) -> None:
        """End all continuations without an answer."""

    def written(self) -> dict[int, int]:
        """Tokens of each continuation that has not ended, those in the making included."""

    def add_score(self, number: int, ids: list[int]) -> None:
        """Begin to score tokens: the log-probability of each after the first, at temperature 1."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Its weights by name."""

    def forget_prefixes(self) -> None:
        """Drop what was computed with earlier weights."""

    def sleep(self) -> None:
        """Give the card's memory back; nothing is sampled until `wake`."""

    def wake(self) -> None:
        """Take it again."""


# What the parent asks. `Ask` and `Score` are answered when they have ended, others at once.


@dataclass(frozen=True)
class Ask:
    """Continue a prompt."""

    number: int
    turn: Turn


@dataclass(frozen=True)
class Attach:
    """Where the trainer's weights lie."""

    sources: list[Source]


@dataclass(frozen=True)
class Write:
    """Take the trainer's weights in as they are now."""

    version: int


@dataclass(frozen=True)
class Score:
    """Say how likely tokens are."""

    number: int
    ids: list[int]


@dataclass(frozen=True)
class Sleep:
    """Give memory back, or (`wake`) take it again."""

    wake: bool = False


@dataclass(frozen=True)
class DropAll:
    """Nobody waits for what is being written any more."""


# What it answers.


@dataclass(frozen=True)
class Answers:
    """Continuations that have ended, by number."""

    sampled: list[tuple[int, Sampled]]


@dataclass(frozen=True)
class Done:
    """It is done, or a sentence about why not."""

    problem: str | None = None


@dataclass(frozen=True)
class Broken:
    """It has not loaded, or cannot go on."""

    problem: str


@dataclass(frozen=True)
class Beat:
    """The engine is alive, and has made so many tokens' passes since it was loaded."""

    steps: int


def serve(connection: Connection, factory: str, options: EngineOptions, parent: int) -> None:
    """Load an engine and answer until the connection ends.

    Args:
        connection: To the parent. The first message is `Done`: loaded, or why not.
        factory: `module:callable`, from `EngineOptions` to an `Engine`.
        options: For it.
        parent: Whose end is the end of this process, too.
    """
    _die_with(parent)
    os.setpgrp()  # signals for the parent's group are the parent's to pass on
    module, _, name = factory.partition(":")
    try:
        engine: Engine = getattr(importlib.import_module(module), name)(options)
    except Exception as error:  # noqa: BLE001  whatever it is, the parent must know
        traceback.print_exc()
        connection.send(Broken(f"{type(error).__name__}: {error}"[:1000]))
        return
    connection.send(Done())
    try:
        _Loop(connection, engine).run()
    except (EOFError, ConnectionError):  # the parent has ended, or wants no more
        pass
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        connection.send(Broken(f"{type(error).__name__}: {error}"[:1000]))
    finally:
        connection.close()
        sys.stdout.flush()
        os._exit(0)  # engines have threads that would keep it


@dataclass
class _Run:
    """One continuation: how many of its tokens each version has written, but for the last."""

    versions: list[int] = field(default_factory=list)


class _Loop:
    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection, self._engine = connection, engine
        self._running: dict[int, _Run] = {}
        self._version = 0
        self._weights: EngineWeights | None = None
        self._steps, self._beat = 0, time.monotonic()

    def run(self) -> None:
        while True:
            while self._connection.poll(0 if self._running else IDLE_SECONDS):
                self._take(self._connection.recv())
            if self._running:
                self._send_finished(self._engine.step())
                self._steps += 1
            if time.monotonic() - self._beat > BEAT_SECONDS:
                self._beat = time.monotonic()
                self._connection.send(Beat(self._steps))

    def _take(self, message: Any) -> None:
        if isinstance(message, Ask):
            self._running[message.number] = _Run()
            self._engine.add(message.number, message.turn)
            return
        if isinstance(message, Score):
            self._running[message.number] = _Run()
            self._engine.add_score(message.number, message.ids)
            return
        if isinstance(message, DropAll):
            self._engine.drop_all()
            self._running.clear()
            return
        try:
            self._answer(message)
            self._connection.send(Done())
        except UnknownWeights as error:
            self._connection.send(Done(problem=str(error)))

    def _answer(self, message: Any) -> None:
        if isinstance(message, Attach):
            self._weights = EngineWeights(self._engine.parameters(), message.sources)
        elif isinstance(message, Write):
            assert self._weights
            for number, count in self._engine.written().items():
                versions = self._running[number].versions
                versions += [self._version] * (count - len(versions))
            self._weights.write()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._engine.forget_prefixes()
            self._version = message.version
        elif isinstance(message, Sleep):
            (self._engine.wake if message.wake else self._engine.sleep)()

    def _send_finished(self, finished: Sequence[Finished]) -> None:
        sampled = []
        for one in finished:
            versions = self._running.pop(one.number).versions[: len(one.ids)]
            versions += [self._version] * (len(one.ids) - len(versions))
            sampled.append((one.number, Sampled(one.ids, one.logps, versions)))
        if sampled:
            self._connection.send(Answers(sampled))


def _die_with(parent: int) -> None:
    """End when the parent does, however it does: an engine without one keeps the card's memory."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)
