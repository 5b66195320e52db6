"""`python -m worker.training.export DIR`: one export, without any server."""

import sys
from pathlib import Path

from dressage.archive import unpack_tar
from dressage.authoring.suite import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.export import GgufAdapterExport, MergedExport, export_name
from dressage.spec.status import Reason
from worker.training.export.spec import ExportRunSpec, Question
from worker.training.failures import RunFailure
from worker.training.process import run_process
from worker.training.run_dir import INPUT, SPEC, SUITE, Manifest, RunDirectory


def run_export(run: RunDirectory) -> None:
    """Merge if need be, convert and register if asked; or answer."""
    spec = ExportRunSpec.model_validate_json((run.path / SPEC).read_bytes())
    unpack_tar(run.path / INPUT, run.path)
    trained = run.path / spec.trained
    suite = Suite.from_path(run.path / SUITE)
    export = spec.export
    if isinstance(export, Question):
        from worker.training.export.answer import answer

        said = answer(spec.job, export.request, trained, spec.trained, suite)
        run.finish(Manifest(files=(), result=said.model_dump(mode="json")))
        return
    if isinstance(export, GgufAdapterExport):
        from worker.training.export.gguf import convert_adapter

        if spec.trained is not ArtifactKind.ADAPTER:
            raise RunFailure(Reason.CONVERSION_FAILED, "the job has trained no adapter")
        name = f"adapter-{export.quantization}.gguf"
        convert_adapter(trained, spec.job.agent.model, run.artifacts / name, export.quantization)
        file = run.describe(name, ArtifactKind.GGUF_ADAPTER)
    else:
        from worker.training.export.merge import merge

        model = trained
        if spec.trained is ArtifactKind.ADAPTER:
            model = run.path / "merged"
            probe = suite.cases[0].conversation(spec.job.agent.instructions)[-1]["content"]
            merge(trained, spec.job.agent.model, model, probe=str(probe))
        if isinstance(export, MergedExport):
            file = run.pack(model, ArtifactKind.MERGED)
        else:
            from worker.training.export.serve import serve

            run.finish(serve(run, spec, export, trained, model, suite))
            return
    run.finish(Manifest(files=(file,), result={"export": export_name(export)}))


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), run_export))
