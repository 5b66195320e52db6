"""What the operator lets a job do."""

from dataclasses import dataclass
from pathlib import Path

from app.exceptions import FieldProblem
from app.jobs.model_check import model_problems
from dressage.spec.job import JobSpec


@dataclass(frozen=True)
class OperatorRules:
    """The part of the settings that jobs are checked against."""

    models_dir: Path | None
    allowed_models: list[str] | None
    allow_network: bool

    def problems(self, spec: JobSpec) -> list[FieldProblem]:
        """Everything in a specification that is not allowed here."""
        problems = model_problems(
            spec.agent, models_dir=self.models_dir, allowed=self.allowed_models
        )
        if spec.resources.network and not self.allow_network:
            message = "the operator does not let suites' code use the network"
            problems.append(FieldProblem(field="resources.network", message=message))
        return problems
