"""`python -m worker.training.export DIR`: one export, without any server."""

import sys
from pathlib import Path

from dressage.archive import unpack_tar
from dressage.authoring.suite import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.export import GgufExport, export_name
from worker.training.export.spec import ExportRunSpec, Question
from worker.training.process import run_process
from worker.training.run_dir import INPUT, SPEC, SUITE, Manifest, RunDirectory


def run_export(run: RunDirectory) -> None:
    """Merge if need be, convert if asked, and put the result into `artifacts/`; or answer."""
    from worker.training.export.gguf import check_answers, convert
    from worker.training.export.merge import merge

    spec = ExportRunSpec.model_validate_json((run.path / SPEC).read_bytes())
    unpack_tar(run.path / INPUT, run.path)
    model = run.path / spec.trained
    if isinstance(spec.export, Question):
        from worker.training.export.answer import answer

        suite = Suite.from_path(run.path / SUITE)
        asked = spec.export
        said = answer(asked.job, asked.request, model, spec.trained, suite)
        run.finish(Manifest(files=(), result=said.model_dump(mode="json")))
        return
    if spec.trained is ArtifactKind.ADAPTER:
        merged = run.path / "merged"
        merge(model, spec.base_model, merged, probe=str(spec.messages[-1]["content"]))
        model = merged
    if isinstance(spec.export, GgufExport):
        name = f"model-{spec.export.quantization}.gguf"
        convert(model, run.artifacts / name, spec.export.quantization)
        check_answers(
            run.artifacts / name, list(spec.messages), list(spec.tools), spec.context_length
        )
        file = run.describe(name, ArtifactKind.GGUF)
    else:
        file = run.pack(model, ArtifactKind.MERGED)
    run.finish(Manifest(files=(file,), result={"export": export_name(spec.export)}))


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), run_export))
