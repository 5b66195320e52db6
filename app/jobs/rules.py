"""What the operator lets a job do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.exceptions import FieldProblem
from app.jobs.model_check import model_problems
from dressage.spec.export import OllamaExport
from dressage.spec.job import JobSpec
from dressage.spec.measure import LlmJudge, RewardSpec


@dataclass(frozen=True)
class OperatorRules:
    """The part of the settings that jobs are checked against."""

    models_dir: Path | None
    allowed_models: list[str] | None
    allow_network: bool
    judge_urls: tuple[str, ...]
    ollama_urls: tuple[str, ...] = ()

    def problems(self, spec: JobSpec) -> list[FieldProblem]:
        """Everything in a specification that is not allowed here."""
        problems = model_problems(
            spec.agent, models_dir=self.models_dir, allowed=self.allowed_models
        )
        if spec.resources.network and not self.allow_network:
            message = "the operator does not let suites' code use the network"
            problems.append(FieldProblem(field="resources.network", message=message))
        return [*problems, *self.judge_problems(spec.rewards)]

    def ollama_problems(self, export: OllamaExport, field: str) -> list[FieldProblem]:
        """An Ollama server that is not allowed, or none at all."""
        allowed = ", ".join(self.ollama_urls) or "none; set DRESSAGE_OLLAMA_URLS"
        if self.ollama_urls and (export.server or self.ollama_urls[0]) in self.ollama_urls:
            return []
        message = f"the operator does not allow this Ollama server; allowed: {allowed}"
        return [FieldProblem(field=field, message=message)]

    def judge_problems(self, rewards: Sequence[RewardSpec]) -> list[FieldProblem]:
        """Judges at addresses that are not allowed."""
        allowed = ", ".join(self.judge_urls) or "none; set DRESSAGE_JUDGE_URLS"
        return [
            FieldProblem(
                field=f"rewards.{at}.measure.base_url",
                message=f"the operator does not allow judges there; allowed: {allowed}",
            )
            for at, reward in enumerate(rewards)
            if isinstance(reward.measure, LlmJudge)
            and reward.measure.base_url.rstrip("/") not in self.judge_urls
        ]
