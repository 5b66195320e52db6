"""Null agents: what the measures give to those who solve nothing."""

import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean

from dressage.measuring.check import texts_in
from dressage.measuring.combine import may_decide
from dressage.spec.job import JobSpec
from dressage.spec.preflight import NullAgent
from dressage.spec.suite import Case
from worker.training.pipeline.parts import Parts
from worker.training.rewards.play import play_scored
from worker.training.rewards.weighted import ScoredRollout
from worker.training.rollout.rollout import Rollout
from worker.training.sampler.protocol import Draws, Sampled, Sampling, Turn

MANY_WORDS = 400
GIVEN_FOR_NOTHING = 0.5
SOME = 0.1
BY_CHANCE = 2  # cases: one answer that happens to be right says nothing


def play_null_agents(
    job: JobSpec, parts: Parts, cases: Sequence[Case], base: Sequence[Rollout]
) -> tuple[NullAgent, ...]:
    """Let every null agent answer every case. A rollout function cannot be scripted: none then."""
    if job.agent.rollout_func:
        return ()
    said = {rollout.case.id: rollout.final_text for rollout in base}
    stuffing = " ".join(dict.fromkeys(texts_in([case.expect for case in cases])))
    agents: dict[str, Callable[[Case], str]] = {
        "empty": lambda _: "",
        "echo": lambda case: case.conversation(None)[-1]["content"] or "",
        "stuffing": lambda _: " ".join(stuffing.split()[:MANY_WORDS]),
        "constant": lambda _: "I do not know.",
        "truncated": lambda case: said[case.id][: len(said[case.id]) // 3],
    }
    return tuple(_played(name, parts, cases, answer) for name, answer in agents.items())


def hacked_measures(
    job: JobSpec, agents: Sequence[NullAgent], base: Sequence[ScoredRollout]
) -> dict[str, str]:
    """Measures that a null agent satisfies: by half, or better than the base model does.

    Only those that decide whether a case is solved: a short answer is no success, and nobody says
    that it is. Reward functions have no scale, so the base model's is theirs.
    """
    found: dict[str, str] = {}
    deciding = may_decide(job.rewards)
    said = [at for at in deciding if any(one.verdicts[at].passed is not None for one in base)]
    for at in said or deciding:
        reward = job.rewards[at]
        known = [s.verdicts[at].value for s in base if s.verdicts[at].value is not None]
        own = fmean(value for value in known if value is not None) if known else 0.0
        for agent in agents:
            value = agent.values[reward.name]
            if value is None:
                continue
            enough = reward.function is None and value >= GIVEN_FOR_NOTHING
            more = value > max(own, SOME) and value * agent.cases >= BY_CHANCE
            if not (enough or more):
                continue
            found.setdefault(
                reward.name,
                f"the measure {reward.name!r} gives {value:.2f} to an agent that solves nothing "
                f"({agent.name}); the base model gets {own:.2f}",
            )
    return found


def _played(
    name: str, parts: Parts, cases: Sequence[Case], answer: Callable[[Case], str]
) -> NullAgent:
    agent = _Scripted(parts, {case.id: answer(case) for case in cases})
    pairs = [(case, 0) for case in cases]
    scored = asyncio.run(play_scored(parts.engine, parts.scorer, pairs, agent, agent.draws))
    rewards = [one.reward for one in scored if one.reward is not None]
    columns = zip(*(one.verdicts for one in scored), strict=True)
    values = {
        verdicts[0].measure: _mean([v.value for v in verdicts if v.value is not None])
        for verdicts in columns
    }
    return NullAgent(name=name, cases=len(cases), mean_reward=_mean(rewards), values=values)


class _Scripted:
    """A sampler that answers each case by a text, and whatever is asked after that by nothing."""

    draws = Draws(Sampling(1.0), 0)

    def __init__(self, parts: Parts, answers: dict[str, str]) -> None:
        self._tokenizer = parts.template.tokenizer
        end = min(parts.trainer.rollouts.end_ids)
        self.end_ids = frozenset([end])
        # A turn is known by its seed.
        self._answers = {
            self.draws.turn([], 1, case, 0, 0).seed: text for case, text in answers.items()
        }

    async def sample(self, turn: Turn) -> Sampled:
        """As for `Sampler`."""
        text = self._answers.get(turn.seed, "")
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][: turn.limit - 1]
        ids = [*ids, *self.end_ids]
        return Sampled(ids, [0.0] * len(ids), [0] * len(ids))

    def join(self, players: int = 1) -> None:
        """As for `Sampler`: nobody is waited for."""

    def leave(self, players: int = 1) -> None:
        """As for `Sampler`."""


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
