"""`python -m worker.training RUN_DIR`: run a job from its directory, without any server.

A job for several GPUs starts itself again, once for each.
"""

import os
import sys
from pathlib import Path

from worker.training.process.boundary import die_with_parent, run_process
from worker.wire.run_dir import SPEC, SUITE, RunDirectory, RunSpec

USAGE = f"usage: python -m worker.training RUN_DIR   (RUN_DIR holds {SPEC} and {SUITE})"


def main() -> int:
    """Check the arguments before anything heavy is loaded."""
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else None
    if folder is None or not all((folder / name).is_file() for name in (SPEC, SUITE)):
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    gpus = RunSpec.model_validate_json((folder / SPEC).read_bytes()).job.resources.gpus
    if gpus and "RANK" not in os.environ:
        # By hand all GPUs of the host are visible; a worker shows those of the job.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    if gpus > 1 and "RANK" not in os.environ:
        die_with_parent()
        from worker.training.pipeline.launch import launch

        return launch(folder, gpus)
    return run_process(folder, _run)


def _run(run: RunDirectory) -> None:
    from worker.training.pipeline.run import run_job

    run_job(run)


if __name__ == "__main__":
    sys.exit(main())
