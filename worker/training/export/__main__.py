"""`python -m worker.training.export DIR`: one export, without any server.

The map: unpack → merge → pack, or convert → run → register; each stage compared with what was
trained. An adapter alone is converted as it is, and a question is answered.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from dressage.archive import unpack_tar
from dressage.authoring.suite import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.export import GgufAdapterExport, GgufExport, MergedExport, OllamaExport
from dressage.spec.status import Reason
from worker.training.export.agent import TrainedAgent, trained_agent
from worker.training.export.gguf import (
    GgufModel,
    check_answer,
    convert,
    convert_adapter,
    convert_base,
    loaded,
)
from worker.training.export.merge import merge
from worker.training.export.ollama import Ollama
from worker.training.export.register import ready_server, register, stop_at_problems
from worker.training.process.boundary import run_process
from worker.training.process.failures import RunFailure
from worker.wire.export_spec import ExportRunSpec, Question
from worker.wire.run_dir import (
    INPUT,
    SPEC,
    SUITE,
    FailureFile,
    Manifest,
    ProducedFile,
    RunDirectory,
)


def run_export(run: RunDirectory) -> None:
    """Make the file that is asked for, or answer the question."""
    spec = ExportRunSpec.model_validate_json((run.path / SPEC).read_bytes())
    unpack_tar(run.path / INPUT, run.path)
    (run.path / INPUT).unlink()  # a model's size
    trained = run.path / spec.trained
    suite = Suite.from_path(run.path / SUITE)
    export = spec.export
    if isinstance(export, Question):
        from worker.training.export.answer import answer

        said = answer(spec.job, export.request, trained, spec.trained, suite)
        run.finish(Manifest(files=(), result=said.model_dump(mode="json")))
    else:
        # Asked first: a server that cannot take the model is known before the work for it.
        server = ready_server(spec, export) if isinstance(export, OllamaExport) else None
        with trained_agent(run, spec, trained, suite) as agent:
            if isinstance(export, GgufAdapterExport):
                file = _adapter_file(run, spec, export, agent)
                _run_on_base(run, spec, file, agent)
                run.finish(Manifest(files=(file,), result=agent.result()))
            elif isinstance(export, MergedExport):
                model, result = _whole_model(run, spec, agent)
                file = run.pack(model, ArtifactKind.MERGED, name=export.file_name)
                run.finish(Manifest(files=(file,), result={**result, **agent.result()}))
            elif isinstance(export, GgufExport):
                file, result = _model_file(run, spec, export, agent)
                run.finish(Manifest(files=(file,), result={**result, **agent.result()}))
            else:
                assert server
                run.finish(_registered(run, spec, export, server, agent))


def _registered(
    run: RunDirectory,
    spec: ExportRunSpec,
    export: OllamaExport,
    server: Ollama,
    agent: TrainedAgent,
) -> Manifest:
    """The file is kept also when it could not be registered."""
    result: dict[str, Any] = {}
    if export.base:
        file = _adapter_file(run, spec, export, agent)
    else:
        file, result = _model_file(run, spec, export, agent)
    failure = None
    try:
        stop_at_problems(export, agent)
        result["ollama"] = register(run, spec, export, server, file, agent)
    except RunFailure as failed:
        failure = FailureFile(reason=failed.reason, message=failed.message)
    return Manifest(files=(file,), result={**result, **agent.result()}, failure=failure)


def _model_file(
    run: RunDirectory, spec: ExportRunSpec, export: GgufExport | OllamaExport, agent: TrainedAgent
) -> tuple[ProducedFile, dict[str, Any]]:
    """A whole model as GGUF, that runs and was compared."""
    model, result = _whole_model(run, spec, agent)
    name, quantization = export.file_name, export.file_quantization
    path = run.artifacts / name
    convert(model, path, quantization, _metadata(spec))
    _run_gguf(loaded(path, context_length=agent.context), f"gguf-{quantization}", agent)
    return run.describe(name, ArtifactKind.GGUF), result


def _run_gguf(model: GgufModel, name: str, agent: TrainedAgent) -> None:
    """A file is not done before it has answered, and was compared if that was asked for."""
    for messages in agent.probes():
        check_answer(model, messages, agent.tools)
    limit = agent.job.training.max_completion_length
    agent.compare(
        name,
        lambda messages, tools: model.respond(messages, tools, max_tokens=limit),
        model.next_token,
        model.render,
    )


def _run_on_base(
    run: RunDirectory, spec: ExportRunSpec, file: ProducedFile, agent: TrainedAgent
) -> None:
    """An adapter answers on its base, which is converted for this and not kept."""
    base = run.path / "base.gguf"
    convert_base(spec.job.agent.model, agent.trained, base)
    model = loaded(base, context_length=agent.context, adapter=run.artifacts / file.name)
    _run_gguf(model, Path(file.name).stem, agent)


def _whole_model(
    run: RunDirectory, spec: ExportRunSpec, agent: TrainedAgent
) -> tuple[Path, dict[str, Any]]:
    """The trained model without an adapter, and how it came about."""
    if spec.trained is not ArtifactKind.ADAPTER:
        return agent.trained, {}
    merged = run.path / "merged"
    report = merge(
        agent.trained,
        spec.job.agent.model,
        merged,
        [str(messages[-1]["content"]) for messages in agent.probes()],
        trained_in_4bit=spec.job.training.load_in_4bit,
    )
    agent.compare_model("merged", merged)
    return merged, {"merge": report.model_dump(mode="json")}


def _adapter_file(
    run: RunDirectory,
    spec: ExportRunSpec,
    export: GgufAdapterExport | OllamaExport,
    agent: TrainedAgent,
) -> ProducedFile:
    if spec.trained is not ArtifactKind.ADAPTER:
        raise RunFailure(Reason.CONVERSION_FAILED, "the job has trained no adapter")
    out = run.artifacts / export.file_name
    convert_adapter(agent.trained, spec.job.agent.model, out, export.file_quantization)
    return run.describe(export.file_name, ArtifactKind.GGUF_ADAPTER)


def _metadata(spec: ExportRunSpec) -> dict[str, str]:
    checkpoint, base = spec.export.checkpoint, spec.job.agent.model
    return {
        "job": spec.job_id,
        "job_name": spec.job.name,
        "suite": spec.job.suite,
        # Of a folder its name alone: where it lies is the host's business.
        "base_model": Path(base).name if base.startswith("/") else base,
        "spec_sha256": hashlib.sha256(spec.job.model_dump_json().encode()).hexdigest(),
        **({"checkpoint_step": str(checkpoint)} if checkpoint else {}),
    }


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), run_export))
