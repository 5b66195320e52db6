"""Runs a job's rewards on finished rollouts, each as soon as it has ended."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from dressage.authoring.measure import MeasureContext
from dressage.measuring.judge import Judge
from dressage.sandbox.pool import TIME_IS_OVER, WorkerPool
from dressage.sandbox.process import Failure, Outcome, Worker
from dressage.seeds import derived_seed
from dressage.spec.measure import LlmJudge, RewardSpec

JUDGE_THREADS = 8
TRL_KEYWORDS = (
    *("prompts", "completions", "completion_ids", "trainer_state", "environments"),
    *("log_metric", "log_extra"),
)
NOT_APPLICABLE = "does not apply to this rollout"  # None of a reward function, as in TRL
MAY_PASS_NEXT_TIME = (Failure.CRASHED, Failure.TIMED_OUT)


class MeasureRunner:
    """Gives an outcome for each reward on each rollout.

    Args:
        rewards: The job's rewards.
        pool: Where the suite's measures run, and built-in ones like them: what users write into a
            pattern or a schema may take for ever, too.
        timeout: Seconds for one call of a measure.
        judge_key: The bearer token for judges.
        until: A time of `time.monotonic()` after which nothing more is measured.
        seed: Of what the suite's code draws.

    Attributes:
        logged: What reward functions have logged, by metric; whoever reads it empties it.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        pool: WorkerPool,
        *,
        timeout: float,
        judge_key: str | None = None,
        until: float | None = None,
        seed: int = 0,
    ) -> None:
        self._until, self._seed = until, seed
        self.logged: dict[str, list[float]] = defaultdict(list)
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout
        self._judges = {
            at: Judge(reward.measure, api_key=judge_key)
            for at, reward in enumerate(self._rewards)
            if isinstance(reward.measure, LlmJudge)
        }
        self._asking = ThreadPoolExecutor(JUDGE_THREADS, thread_name_prefix="judge")

    def run(
        self, contexts: Sequence[MeasureContext], workers: Sequence[Worker | None]
    ) -> list[list[Outcome]]:
        """Outcomes by rollout, each in the order of the rewards.

        Args:
            contexts: What the measures may look at, one for each rollout.
            workers: The process of each rollout's environment, or None.
        """

        async def together() -> list[list[Outcome]]:
            measuring = map(self.measured, contexts, workers)
            measured = list(await asyncio.gather(*measuring))
            return await self.completed(measured, contexts, workers)

        return asyncio.run(together())

    async def measured(
        self, context: MeasureContext, worker: Worker | None
    ) -> list[Outcome | None]:
        """What each reward says of one rollout; None: a reward function, which sees several.

        An environment takes one call after the other.
        """
        rounds = [self._measured(at, context, worker) for at in range(len(self._rewards))]
        if worker:
            return [await one for one in rounds]
        return list(await asyncio.gather(*rounds))

    async def completed(
        self,
        measured: Sequence[Sequence[Outcome | None]],
        contexts: Sequence[MeasureContext],
        workers: Sequence[Worker | None],
        *,
        completion_ids: Sequence[list[int]] | None = None,
        state: dict[str, Any] | None = None,
    ) -> list[list[Outcome]]:
        """The same with what reward functions say of all these rollouts.

        Args:
            measured: What `measured` gave, one for each rollout.
            contexts: What the functions may look at.
            workers: The process of each rollout's environment, or None.
            completion_ids: Tokens of each rollout.
            state: TRL's `trainer_state`: `global_step` and others.
        """
        more: dict[str, Any] = {"trainer_state": state or {}}
        if completion_ids is not None:
            more["completion_ids"] = list(completion_ids)
        said = {
            at: await self._function(reward.function, contexts, workers, more)
            for at, reward in enumerate(self._rewards)
            if reward.function is not None and contexts
        }
        return [
            [outcome or said[at][number] for at, outcome in enumerate(outcomes)]
            for number, outcomes in enumerate(measured)
        ]

    def close(self) -> None:
        """Give the judges' connections back."""
        self._asking.shutdown()
        for judge in self._judges.values():
            judge.close()

    async def _measured(
        self, at: int, context: MeasureContext, worker: Worker | None
    ) -> Outcome | None:
        reward = self._rewards[at]
        if reward.function is not None:
            return None
        if at in self._judges:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._asking, self._judged, at, context)
        if isinstance(reward.measure, str):
            request = {
                "call": "measure",
                "name": reward.measure,
                "context": _crossing(context),
                "seed": self._seed_of(reward.measure, context),
            }
            return await self._in_sandbox(request, worker)
        assert reward.measure
        measure = reward.measure.model_dump(mode="json", by_alias=True)
        call = {"call": "builtin", "measure": measure, "context": _crossing(context)}
        return await self._in_sandbox(call, None)

    def _judged(self, at: int, context: MeasureContext) -> Outcome:
        if self._until is not None and time.monotonic() > self._until:
            return TIME_IS_OVER
        return self._judges[at].verdict(context)

    async def _in_sandbox(
        self, request: dict[str, Any], worker: Worker | None, *, rollouts: int = 1
    ) -> Outcome:
        timeout = self._timeout * rollouts
        outcome = await self._pool.call(worker, request, timeout, until=self._until)
        if outcome.failure in MAY_PASS_NEXT_TIME and not worker:
            outcome = await self._pool.call(worker, request, timeout, until=self._until)
        return outcome

    async def _function(
        self,
        name: str,
        contexts: Sequence[MeasureContext],
        workers: Sequence[Worker | None],
        more: dict[str, Any],
    ) -> list[Outcome]:
        """A reward function sees all rollouts at once, as TRL's do, and has time for each."""
        request = {
            "call": "reward_function",
            "name": name,
            "prompts": [c.messages[: c.prompt_length] for c in contexts],
            "completions": [c.messages[c.prompt_length :] for c in contexts],
            "columns": _columns(contexts),
            "seed": self._seed_of(name, contexts[0]),
            **more,
        }
        if any(workers):
            request["environments"] = await self._snapshots(workers)
        outcome = await self._in_sandbox(request, None, rollouts=len(contexts))
        if outcome.failure:
            return [outcome] * len(contexts)
        for metric, value in outcome.value["metrics"].items():
            self.logged[metric].append(value)
        return [
            Outcome(value={"value": value, "reason": NOT_APPLICABLE if value is None else ""})
            for value in outcome.value["rewards"]
        ]

    async def _snapshots(self, workers: Sequence[Worker | None]) -> list[dict[str, str] | None]:
        """The environments as they are now, as the sandbox gives and takes them, or why not."""
        return list(await asyncio.gather(*map(self._snapshot, workers)))

    async def _snapshot(self, worker: Worker | None) -> dict[str, str] | None:
        if worker is None:
            return None
        request = {"call": "snapshot"}
        outcome = await self._pool.call(worker, request, self._timeout, until=self._until)
        return {"error": outcome.message} if outcome.failure else {"content": outcome.value}

    def _seed_of(self, name: str, context: MeasureContext) -> int:
        """The same for all rollouts of a case."""
        case = json.dumps([context.input, context.expect], sort_keys=True, default=str)
        return derived_seed(self._seed, name, case)


def _crossing(context: MeasureContext) -> dict[str, Any]:
    """The context as it crosses the pipe; the environment is on the other side."""
    content = asdict(context)
    del content["environment"]
    return {**content, "final": context.final.text}


def _columns(contexts: Sequence[MeasureContext]) -> dict[str, list[Any]]:
    """What cases carry besides their input, as TRL passes dataset columns."""
    rows = [{**context.metadata, **context.expect, **context.extra} for context in contexts]
    names = sorted({name for row in rows for name in row} - set(TRL_KEYWORDS))
    return {name: [row.get(name) for row in rows] for name in names}
