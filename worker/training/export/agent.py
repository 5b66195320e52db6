"""The trained agent of an export: its cases, tools and context, and the comparison with it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from dressage.authoring.suite import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.spec.agent import AgentSpec
from dressage.spec.artifact import ArtifactKind
from dressage.spec.chat import Message, ToolFunction
from dressage.spec.event import EventType
from dressage.spec.parity import ParityReport
from worker.training.evaluate import split
from worker.training.export.parity import NextToken, ParityCheck
from worker.training.export.served import Chat, Render, agent_template
from worker.training.model import context_length, load_model
from worker.training.process.user_code import user_code
from worker.wire.export_spec import ExportRunSpec
from worker.wire.run_dir import TOOLS, RunDirectory

WORKERS = 4
ROUND = 256  # context lengths are multiples of it
PROBES = 3  # cases that are asked when nothing else is


class TrainedAgent:
    """What is exported.

    Attributes:
        job: Its specification.
        trained: The adapter, or the whole model.
        tokenizer: As it was trained with.
        tools: Their schemas, as a server takes them.
        cases: Held-out ones; any, if the job has none.
        context: Tokens of the longest prompt and a whole completion, as far as the model goes.
        fits: Tokens that the model can hold.
        reports: Of the comparisons so far.
    """

    def __init__(
        self, run: RunDirectory, spec: ExportRunSpec, trained: Path, suite: Suite, pool: WorkerPool
    ) -> None:
        self._run, self._spec = run, spec
        job = spec.job
        self.job, self.trained = job, trained
        tokenizer = AutoTokenizer.from_pretrained(trained)
        schemas = shown_tools(job.agent, trained, pool)
        template = agent_template(job.agent, tokenizer, schemas)
        self.tokenizer, self.tools = template.tokenizer, template.tools
        if (trained / "chat_template.jinja").read_text() != self.tokenizer.chat_template:
            self.tokenizer.save_pretrained(trained)  # of a job before templates were frozen
        _, held_out = split(suite.cases, job.evaluation)
        self.cases = held_out or list(suite.cases)
        conversations = [case.conversation(job.agent.instructions) for case in suite.cases]
        # What an environment adds to a prompt is known only from where it was played.
        longest = max(
            spec.longest_prompt, *(len(template.prompt(messages)) for messages in conversations)
        )
        needed = longest + job.training.max_completion_length
        self.fits = context_length(AutoConfig.from_pretrained(self._model_name))
        self.context = min(-(-needed // ROUND) * ROUND, self.fits)
        self.reports: list[ParityReport] = []
        self._check: ParityCheck | None = None
        if job.agent.rollout_func and spec.export.parity_cases:
            message = "a rollout function played the rollouts, which no server does: not compared"
            run.emit(EventType.WARNING, code="parity", message=message)
        elif spec.export.parity_cases and held_out:
            cases = held_out[: spec.export.parity_cases]
            self._check = ParityCheck(job, self._model(), template, pool, cases)

    @property
    def is_compared(self) -> bool:
        """Whether there is a parity report."""
        return self._check is not None

    def probes(self) -> list[list[Message]]:
        """Some conversations to begin."""
        instructions = self.job.agent.instructions
        return [case.conversation(instructions) for case in self.cases[:PROBES]]

    def compare_model(self, served: str, path: Path) -> None:
        """Report on a whole model, if reports are asked for."""
        if self._check:
            model = load_model(str(path), dtype="float32", use_cpu=True)
            self._noted(self._check.report_model(served, model))

    def compare(
        self,
        served: str,
        chat: Chat,
        next_token: NextToken | None = None,
        render: Render | None = None,
    ) -> None:
        """Report on what a server answers, if reports are asked for."""
        if self._check:
            self._noted(self._check.report(served, chat, next_token, render))

    def result(self) -> dict[str, Any]:
        """The reports, for the export's result."""
        return {"parity": [report.model_dump(mode="json") for report in self.reports]}

    @property
    def _model_name(self) -> str:
        """Where the configuration is."""
        adapter = self._spec.trained is ArtifactKind.ADAPTER
        return self.job.agent.model if adapter else str(self.trained)

    def _model(self) -> Any:
        """The model as it was trained: an adapter on its base, unmerged."""
        model = load_model(self._model_name, dtype="float32", use_cpu=True)
        if self._spec.trained is ArtifactKind.ADAPTER:
            return PeftModel.from_pretrained(model, self.trained)
        return model

    def _noted(self, report: ParityReport) -> None:
        self.reports.append(report)
        for note in report.notes:
            self._run.emit(EventType.WARNING, code="parity", message=f"{report.served}: {note}")
        if report.problems:
            problems = ", ".join(report.problems)
            message = f"{report.served} is not what was trained: {problems}{_difference(report)}"
            self._run.emit(EventType.WARNING, code="parity", message=message)


def shown_tools(agent: AgentSpec, trained: Path, pool: WorkerPool) -> list[ToolFunction]:
    """The tools as the model saw them in training: kept beside its weights."""
    if (trained / TOOLS).is_file():
        return [tool["function"] for tool in json.loads((trained / TOOLS).read_bytes())]
    return agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments)


def _difference(report: ParityReport) -> str:
    found = report.first_difference
    if found is None:
        return ""
    return (
        f"; the prompt of turn {found.turn} of case {found.case_id!r} has {found.served!r} for "
        f"{found.trained!r}"
    )


@contextmanager
def trained_agent(
    run: RunDirectory, spec: ExportRunSpec, trained: Path, suite: Suite
) -> Iterator[TrainedAgent]:
    """The agent, with its suite's code running in the sandbox meanwhile."""
    with user_code(suite, network=spec.job.resources.network, size=WORKERS) as pool:
        yield TrainedAgent(run, spec, trained, suite, pool)
