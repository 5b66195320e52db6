"""What the operator lets a job do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.exceptions import FieldProblem
from dressage.spec.export import OllamaExport, without_secrets
from dressage.spec.job import JobSpec
from dressage.spec.measure import LlmJudge, RewardSpec
from dressage.spec.team import Role


@dataclass(frozen=True)
class AdmissionPolicy:
    """The part of the settings that jobs are checked against.

    Attributes:
        models_dir: If set, model directories lie below it.
        allowed_models: If set, the only hub names that may be used.
        allow_network: Whether suites' code may use the network when a job asks.
        judge_urls: Base URLs of the endpoints that judges may use, without a slash at the end.
        ollama_urls: Servers that models may be registered in; the first is the default.
        max_queued_jobs: Of a team that has no limit of its own.
        max_waiting_tasks: Exports and questions of a team that no worker has taken yet.
    """

    models_dir: Path | None
    allowed_models: list[str] | None
    allow_network: bool
    judge_urls: tuple[str, ...]
    ollama_urls: tuple[str, ...] = ()
    max_queued_jobs: int = 1000
    max_waiting_tasks: int = 200

    def network_problems(self, spec: JobSpec) -> list[FieldProblem]:
        """A job whose code wants the network that the operator does not give."""
        if not spec.resources.network or self.allow_network:
            return []
        message = "the operator does not let suites' code use the network"
        return [FieldProblem(field="resources.network", message=message)]

    def priority_problems(self, spec: JobSpec, role: Role) -> list[FieldProblem]:
        """A class that would hold up everybody else."""
        if spec.priority != "urgent" or role is Role.OPERATOR:
            return []
        message = "only an operator's key may submit urgent jobs; 'high' is the highest class"
        return [FieldProblem(field="priority", message=message)]

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

    def ollama_problems(self, export: OllamaExport, field: str) -> list[FieldProblem]:
        """An Ollama server that is not allowed, or none at all."""
        shown = [without_secrets(url) for url in self.ollama_urls]
        allowed = ", ".join(shown) or "none; set DRESSAGE_OLLAMA_URLS"
        if shown and (export.server or shown[0]) in shown:
            return []
        message = f"the operator does not allow this Ollama server; allowed: {allowed}"
        return [FieldProblem(field=field, message=message)]
