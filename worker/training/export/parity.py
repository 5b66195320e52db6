"""The parity report: held-out cases through the trained model and through what is served."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from peft import PeftModel

from dressage.intervals import paired_passes
from dressage.sandbox.pool import WorkerPool
from dressage.spec.chat import Message
from dressage.spec.event import Gain
from dressage.spec.job import JobSpec
from dressage.spec.parity import ParityProblem, ParityReport, PromptDifference
from dressage.spec.suite import Case
from dressage.spec.tool_schema import for_ollama
from worker.training.export.answers import ServedAnswer
from worker.training.export.served import Chat, Render, Served, ServedEngine
from worker.training.model import context_length, end_ids
from worker.training.rewards.weighted import ScoredRollout, Scorer
from worker.training.rollout.engine import AgentParts, RolloutLimits
from worker.training.rollout.rollout import Rollout
from worker.training.rollout.template import ConversationTemplate
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Draws, Sampling

SAME_PROMPT = 0.9  # of the cases, else the template is another one
RUNS_ON = 0.2  # of the first turns, more than in training
TOKENS = 8  # of each answer whose distributions are compared
LIKELIEST = 40  # tokens of a distribution that are kept
NEARER = 0.5  # of the distance to the base: a quantized model lies near the trained one
KNOWN = 0.5  # of the distributions, else what is known says too little
LEAST = 1e-9  # probability of all others together, below which it is rounding
BEFORE_DIFFERENCE, AFTER_DIFFERENCE = 30, 60  # characters that are shown of two prompts
MEASURABLE = 1e-4  # nats between base and trained model, below which neither is nearer

# Log-probabilities of the likeliest next tokens after some token ids, by token id.
# None: the server does not say, or it has read the tokens as others.
NextToken = Callable[[list[int]], dict[int, float] | None]


@dataclass(frozen=True)
class Reference:
    """What the trained model said as the trainer plays it, and the base below it."""

    rollouts: list[Rollout]
    scored: list[ScoredRollout]
    prefixes: list[list[int]]
    next_tokens: list[dict[int, float]]
    base_next_tokens: list[dict[int, float]] | None


class ParityCheck:
    """Plays a job's held-out cases, once by the trained model and then by each thing served."""

    def __init__(
        self,
        job: JobSpec,
        model: Any,
        template: ConversationTemplate,
        pool: WorkerPool,
        cases: Sequence[Case],
    ) -> None:
        self._cases, self._template = list(cases), template
        self._tokenizer = template.tokenizer
        self._ends = end_ids(job.agent.model, self._tokenizer)
        training = job.training
        self._engine = ServedEngine(
            template=template,
            agent=AgentParts(job.agent.instructions, job.agent.environment, training.seed),
            pool=pool,
            limits=RolloutLimits(
                completion_tokens=training.max_completion_length,
                context_tokens=context_length(model.config),
                tool_iterations=training.max_tool_iterations,
                tool_timeout=training.tool_timeout,
                tool_output=training.max_tool_output,
            ),
        )
        self._scorer = Scorer(
            job.rewards,
            pool,
            timeout=training.tool_timeout,
            judge_key=os.environ.get("DRESSAGE_JUDGE_KEY"),
            seed=training.seed,
        )
        self._reference = self._play_reference(model)  # only its answers are kept

    def report_model(self, served: str, model: Any) -> ParityReport:
        """Compare another model of this process: the merged one."""
        rollouts = self._play(model)
        played = [
            Served(
                rollout,
                ServedAnswer({}, len(rollout.prompt_ids), cut_off=rollout.truncated),
            )
            for rollout in rollouts
        ]
        return self._compare(served, played, lambda prefix: _next_token(model, prefix))

    def report(
        self,
        served: str,
        chat: Chat,
        next_token: NextToken | None = None,
        render: Render | None = None,
    ) -> ParityReport:
        """Compare one thing that is served with the trained model.

        Args:
            served: Its name in the report.
            chat: Answers a conversation.
            next_token: Its distributions, if it gives them.
            render: Its prompts as text, if it gives them.
        """
        played = self._engine.play_served(self._cases, chat, render)
        return self._compare(served, played, next_token)

    def _compare(
        self, served: str, played: Sequence[Served], next_token: NextToken | None
    ) -> ParityReport:
        reference = self._reference
        scored = self._scorer.score([one.rollout for one in played])
        gain = Gain.of(paired_passes(_passed(reference.scored), _passed(scored)))
        counted, notes, difference = self._prompts(played)
        cut_off = fmean(one.first.cut_off for one in played)
        expected_cut_off = fmean(rollout.truncated for rollout in reference.rollouts)
        distances = _distances(reference, next_token) if next_token else {}
        problems = []
        if gain and gain.high is not None and gain.high < 0:
            problems.append(ParityProblem.PASS_RATE_DROP)
        if next_token and not distances:
            notes.append(
                "its distributions could not be compared: it does not give them, or reads the "
                "trained model's tokens as others; whether an adapter was dropped is not known"
            )
        if counted and fmean(counted) < SAME_PROMPT:
            problems.append(ParityProblem.PROMPT_DIFFERS)
        if cut_off > expected_cut_off + RUNS_ON:
            problems.append(ParityProblem.RUNS_ON)
        if _nearer_to_base(reference, distances):
            problems.append(ParityProblem.NEARER_TO_BASE)
        return ParityReport(
            served=served,
            cases=len(self._cases),
            pass_rate=gain,
            same_prompt=fmean(counted) if counted else None,
            same_answer=fmean(
                _same_turn(one, rollout)
                for one, rollout in zip(played, reference.rollouts, strict=True)
            ),
            cut_off=cut_off,
            problems=tuple(problems),
            notes=tuple(notes),
            first_difference=difference,
            **distances,
        )

    def _prompts(
        self, played: Sequence[Served]
    ) -> tuple[list[bool], list[str], PromptDifference | None]:
        """Whether each prompt is the trained one, notes, and where the first differs.

        Every turn's as text, where it is known as text; else the tokens of the first are counted.
        """
        same, notes, difference = [], [], None
        reduced = [
            {"type": "function", "function": for_ollama(tool["function"])[0]}
            for tool in self._template.tools
        ]
        for one in played:
            for turn, prompt in enumerate(one.prompts):
                trained, served = (self._bare(text) for text in (prompt.trained, prompt.served))
                same.append(trained == served)
                if trained == served:
                    continue
                known = self._bare(self._template.prompt_text(prompt.messages, tools=reduced))
                if reduced != self._template.tools and served == known:
                    same[-1] = True
                    notes = [
                        "it shows the tools without some keywords that they were trained with; "
                        "train with agent.tool_schema ollama to leave them out there, too"
                    ]
                elif difference is None:
                    difference = _difference(one.rollout.case.id, turn, trained, served)
        if not any(one.prompts for one in played):
            same = [
                one.first.prompt_tokens == len(rollout.prompt_ids)
                for one, rollout in zip(played, self._reference.rollouts, strict=True)
                if one.first.prompt_tokens is not None
            ]
        return same, notes, difference

    def _bare(self, text: str) -> str:
        """A prompt without the first token, which some servers add later."""
        return text.removeprefix(self._tokenizer.bos_token or "")

    def _play(self, model: Any) -> list[Rollout]:
        """Greedily, as the trainer plays."""
        sampler = TransformersSampler(model, self._tokenizer)
        cases = [(case, 0) for case in self._cases]
        return self._engine.play(cases, sampler, Draws(Sampling(0.0), 0))

    def _play_reference(self, model: Any) -> Reference:
        rollouts = self._play(model)
        scored = self._scorer.score(rollouts)
        prefixes = [
            rollout.prompt_ids + rollout.completion_ids[:length]
            for rollout in rollouts
            for length in range(min(TOKENS, len(rollout.completion_ids)))
        ]
        base = None
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                base = [_next_token(model, prefix) for prefix in prefixes]
        own = [_next_token(model, prefix) for prefix in prefixes]
        return Reference(rollouts, scored, prefixes, own, base)


def _difference(case_id: str, turn: int, trained: str, served: str) -> PromptDifference:
    at = next(
        (i for i, (a, b) in enumerate(zip(trained, served, strict=False)) if a != b),
        min(len(trained), len(served)),
    )
    begin = max(0, at - BEFORE_DIFFERENCE)
    return PromptDifference(
        case_id=case_id,
        turn=turn,
        trained=trained[begin : at + AFTER_DIFFERENCE],
        served=served[begin : at + AFTER_DIFFERENCE],
    )


def _distances(reference: Reference, next_token: NextToken) -> dict[str, float]:
    served = [next_token(prefix) for prefix in reference.prefixes]
    known = [at for at, said in enumerate(served) if said]
    if len(known) < KNOWN * len(served):
        return {}
    pairs = [(reference.next_tokens[at], served[at]) for at in known]
    found = {
        "kl": fmean(_kl(own, said) for own, said in pairs),
        "top_token": fmean(_likeliest(own) == _likeliest(said) for own, said in pairs),
        "distributions": len(known),
    }
    if reference.base_next_tokens:
        found["kl_base"] = fmean(_kl(reference.base_next_tokens[at], served[at]) for at in known)
    return found


def _likeliest(distribution: dict[int, float]) -> int:
    return max(distribution, key=distribution.__getitem__)


def _nearer_to_base(reference: Reference, distances: dict[str, float]) -> bool:
    """Whether what is served lies at the base model: its adapter was dropped on the way."""
    if not reference.base_next_tokens or "kl" not in distances:
        return False
    apart = fmean(map(_kl, reference.next_tokens, reference.base_next_tokens))
    return apart > MEASURABLE and distances["kl"] > NEARER * apart > distances["kl_base"]


@torch.no_grad()
def _next_token(model: Any, prefix: list[int]) -> dict[int, float]:
    model.eval()
    logits = model(input_ids=torch.tensor([prefix], device=model.device)).logits[0, -1].float()
    found = logits.log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def _kl(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p ‖ q) in nats over the tokens that both list and all others as one: a lower bound."""
    both = p.keys() & q.keys()
    known = sum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
    rest_p = max(1 - sum(math.exp(p[token]) for token in both), LEAST)
    rest_q = max(1 - sum(math.exp(q[token]) for token in both), LEAST)
    return max(0.0, known + rest_p * math.log(rest_p / rest_q))


def _passed(scored: Sequence[ScoredRollout]) -> dict[str, bool]:
    return {s.rollout.case.id: s.passed for s in scored if s.reward is not None}


def _same_turn(one: Served, rollout: Rollout) -> bool:
    length = rollout.prompt_length
    return _essence(one.rollout.messages[length:]) == _essence(rollout.messages[length:])


def _essence(messages: Sequence[Message]) -> tuple[str, list[Any]] | None:
    """Text and calls of the first assistant message."""
    turn = next((m for m in messages if m["role"] == "assistant"), None)
    if turn is None:
        return None
    calls = [call["function"] for call in turn.get("tool_calls") or []]
    named = [(call["name"], call["arguments"]) for call in calls]
    return (turn.get("content") or "").strip(), named
