"""From a whole model to a file that runs and a name in Ollama, compared with what was trained."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from dressage.authoring.suite import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.event import EventType
from dressage.spec.export import GgufExport, OllamaExport
from dressage.spec.job import JobSpec
from dressage.spec.parity import ParityReport
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.evaluate import split
from worker.training.export.answers import ServedAnswer
from worker.training.export.gguf import GgufModel, check_answers, convert
from worker.training.export.ollama import Ollama, full_name
from worker.training.export.parity import ParityCheck
from worker.training.export.served import agent_template
from worker.training.export.spec import ExportRunSpec
from worker.training.failures import RunFailure
from worker.training.run_dir import FailureFile, Manifest, RunDirectory
from worker.training.update.model import context_length, end_ids, load_model
from worker.training.user_code import user_code

log = logging.getLogger(__name__)

WORKERS = 4
ROUND = 256  # context lengths are multiples of it
OLDEST_OLLAMA = (0, 30)  # the first that uses the template inside the GGUF
CHECKED_CASES = 3  # that the file must answer before it is called done


def serve(
    run: RunDirectory,
    spec: ExportRunSpec,
    export: GgufExport | OllamaExport,
    trained: Path,
    model: Path,
    suite: Suite,
) -> Manifest:
    """Convert, run, compare and, if asked, register.

    Args:
        run: Where the file goes.
        spec: Of the export.
        export: What is asked for.
        trained: The adapter, or the whole model.
        model: The whole model.
        suite: The job's.

    Returns:
        The GGUF file, and what there is to say of it. It is kept also when it could not be
        registered: the server refuses it, or it is not what was trained.

    Raises:
        RunFailure: There is no file: it does not convert or run.
    """
    job = spec.job
    server = _ready_server(spec, export) if isinstance(export, OllamaExport) else None
    name = f"model-{export.quantization}.gguf"
    path = run.artifacts / name
    convert(model, path, export.quantization, _metadata(spec))
    file = run.describe(name, ArtifactKind.GGUF)
    _, held_out = split(suite.cases, job.evaluation.held_out(len(suite.cases)))
    with user_code(suite, network=job.resources.network, size=WORKERS) as pool:
        tokenizer = AutoTokenizer.from_pretrained(trained)
        tools = job.agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments)
        needed = _context(job, suite.cases, tokenizer, tools, model)
        schemas = [{"type": "function", "function": tool} for tool in tools]
        for case in (held_out or list(suite.cases))[:CHECKED_CASES]:
            check_answers(path, case.conversation(job.agent.instructions), schemas, needed)
        check = None
        if export.parity_cases and held_out:
            reference = _trained_model(job, spec.trained, trained)
            check = ParityCheck(job, reference, tokenizer, pool, held_out[: export.parity_cases])
        result: dict[str, Any] = {}
        if check:
            gguf = GgufModel(path, context_length=needed)
            limit = job.training.max_completion_length
            report = check.report(
                path.stem.replace("model", "gguf"),
                lambda messages, tools: gguf.respond(messages, tools, max_tokens=limit),
                gguf.next_token,
            )
            result["parity"] = _noted(run, report)
            del gguf
        failure = None
        if isinstance(export, OllamaExport):
            assert server
            try:
                _stop_at_problems(export, result.get("parity"))
                result |= _register(
                    run, spec, export, server, path, needed, tokenizer, tools, check
                )
            except RunFailure as failed:
                failure = FailureFile(reason=failed.reason, message=failed.message)
    return Manifest(files=(file,), result=result, failure=failure)


def _register(
    run: RunDirectory,
    spec: ExportRunSpec,
    export: OllamaExport,
    server: Ollama,
    file: Path,
    needed: int,
    tokenizer: Any,
    tools: list[dict[str, Any]],
    check: ParityCheck | None,
) -> dict[str, Any]:
    """Make the model under a name nobody uses, look at it, and only then under its own."""
    job = spec.job
    digest = server.upload(file)
    request = {
        "files": {file.name: digest},
        "parameters": _parameters(export, job, tokenizer, needed),
        **({"system": job.agent.instructions} if export.system_prompt else {}),
    }
    with _staged(server, export, spec.job_id) as staging:
        server.create({"model": staging, **request}, lambda status: _say(run, status))
        if tools and "tools" not in server.capabilities(staging):
            raise RunFailure(
                Reason.OLLAMA_REFUSED,
                "Ollama does not see tools in the chat template of this model, but the agent has "
                "some",
            )
        result: dict[str, Any] = {}
        if check:

            def chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ServedAnswer:
                limit = job.training.max_completion_length
                return server.chat(staging, messages, tools, temperature=0.0, num_predict=limit)

            report = check.report(f"ollama:{export.name}", chat)
            result["ollama_parity"] = _noted(run, report)
            _stop_at_problems(export, result["ollama_parity"])
        server.create({"model": export.name, **request}, lambda status: _say(run, status))
    return {
        **result,
        "ollama": {
            "server": spec.ollama_url,
            "name": export.name,
            "digest": digest,
            "parameters": request["parameters"],
        },
    }


@contextmanager
def _staged(server: Ollama, export: OllamaExport, job_id: str) -> Iterator[str]:
    """A name to try a model under; nothing is left of it, whatever happens."""
    mark = hashlib.sha256(f"{job_id} {export.name}".encode()).hexdigest()[:12]
    staging = f"dressage-staging-{mark}"
    try:
        yield staging
    finally:
        try:
            server.delete(staging)
        except RunFailure as failure:
            log.warning("%s may be left behind: %s", staging, failure.message)


def _ready_server(spec: ExportRunSpec, export: OllamaExport) -> Ollama:
    """The server, asked before anything is converted for it."""
    if spec.ollama_url is None:
        raise RunFailure(
            Reason.OLLAMA_REFUSED, "the operator has named no Ollama server (DRESSAGE_OLLAMA_URLS)"
        )
    server = Ollama(spec.ollama_url)
    version = server.version()
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_OLLAMA:
        raise RunFailure(
            Reason.OLLAMA_REFUSED,
            f"Ollama {version} does not use the chat template inside a GGUF, so what it served "
            f"would not be what was trained; {'.'.join(map(str, OLDEST_OLLAMA))} or newer does",
        )
    if not export.overwrite and server.has(export.name):
        raise RunFailure(
            Reason.OLLAMA_REFUSED,
            f"{spec.ollama_url} has a model {full_name(export.name)!r}; choose another name, or "
            "set overwrite",
        )
    return server


def _parameters(export: OllamaExport, job: JobSpec, tokenizer: Any, needed: int) -> dict[str, Any]:
    """Every stop token, and a context that holds what the agent was trained on."""
    stops = sorted(
        token
        for token in map(tokenizer.decode, end_ids(job.agent.model, tokenizer))
        if token.strip()
    )
    parameters: dict[str, Any] = {"num_ctx": export.num_ctx or needed, "stop": stops}
    if export.temperature is not None:
        parameters["temperature"] = export.temperature
    return parameters


def _context(
    job: JobSpec, cases: tuple[Case, ...], tokenizer: Any, tools: list[dict[str, Any]], model: Path
) -> int:
    """Tokens of the longest prompt and a whole completion, within what the model can hold."""
    template = agent_template(job.agent, tokenizer, tools)
    longest = max(len(template.prompt(c.conversation(job.agent.instructions))) for c in cases)
    needed = longest + job.training.max_completion_length
    rounded = -(-needed // ROUND) * ROUND
    return min(rounded, context_length(AutoConfig.from_pretrained(model)))


def _trained_model(job: JobSpec, kind: ArtifactKind, trained: Path) -> Any:
    """The model as it was trained: an adapter on its base, unmerged."""
    if kind is ArtifactKind.ADAPTER:
        base = load_model(job.agent.model, dtype="float32", use_cpu=True)
        return PeftModel.from_pretrained(base, trained)
    return load_model(str(trained), dtype="float32", use_cpu=True)


def _metadata(spec: ExportRunSpec) -> dict[str, str]:
    return {
        "job": spec.job_id,
        "suite": spec.job.suite,
        "base_model": spec.job.agent.model,
        "spec_sha256": hashlib.sha256(spec.job.model_dump_json().encode()).hexdigest(),
    }


def _noted(run: RunDirectory, report: ParityReport) -> dict[str, Any]:
    if report.problems:
        problems = ", ".join(report.problems)
        message = f"{report.served} is not what was trained: {problems}"
        run.emit(EventType.WARNING, code="parity", message=message)
    return report.model_dump(mode="json")


def _stop_at_problems(export: OllamaExport, report: dict[str, Any] | None) -> None:
    if report and report["problems"] and export.on_problem == "refuse":
        raise RunFailure(
            Reason.PARITY_FAILED,
            f"{report['served']} is not what was trained: {', '.join(report['problems'])}; it was "
            "not registered (set on_problem to flag to register it all the same)",
        )


def _say(run: RunDirectory, status: str) -> None:
    run.emit(EventType.LOG, level="info", message=f"Ollama: {status}")
