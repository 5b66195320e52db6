"""What can be known about exports before a worker spends time on them."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import repository as artifacts
from app.broker.wake import Queue
from app.db.models import JobRow
from app.exceptions import FieldProblem, JobInvalid, JobNotTrained
from app.exports.leases import TRAINED
from app.policy import AdmissionPolicy
from app.workers import repository as workers
from dressage.spec.export import K_QUANTS, OllamaExport
from dressage.spec.job import JobSpec

LLAMA_QUANTIZE = "llama-quantize"  # among the versions that a worker reports


async def require_trained(session: AsyncSession, job: JobRow, checkpoint: int | None) -> None:
    """Files to export, or to ask.

    Raises:
        JobNotTrained: There is no result (yet), or it is gone.
        JobInvalid: The job keeps no such checkpoint.
    """
    spec = JobSpec.model_validate(job.spec)
    if checkpoint is None and (
        job.status not in TRAINED or spec.preflight.only or spec.evaluation.only
    ):
        raise JobNotTrained(f"the job is {job.status}; only a trained one has a result to use")
    if await artifacts.trained(session, job.id, checkpoint):
        return
    if checkpoint is None:
        raise JobNotTrained("the job's files were removed; train it again")
    steps = await artifacts.checkpoints(session, job.id)
    there = f"it keeps {', '.join(map(str, steps))}" if steps else "it keeps none"
    message = f"the job has no checkpoint of step {checkpoint}; {there} (training.keep_checkpoints)"
    raise JobInvalid.of([FieldProblem(field="checkpoint", message=message)])


async def export_problems(
    session: AsyncSession, policy: AdmissionPolicy, spec: JobSpec, *, trained: bool
) -> list[FieldProblem]:
    """Exports that no worker here can make, or that are not allowed."""
    problems = []
    for at, export in enumerate(spec.exports):
        field = f"exports.{at}"
        if export.checkpoint and not trained:
            message = "the steps that are kept are known after the training; ask for it then"
            problems.append(FieldProblem(field=f"{field}.checkpoint", message=message))
        if export.adapter_field and not spec.training.lora:
            instead = {"type": "export gguf", "base": "leave base out"}[export.adapter_field]
            message = f"the job trains no adapter: set training.lora, or {instead}"
            problems.append(FieldProblem(field=f"{field}.{export.adapter_field}", message=message))
        if isinstance(export, OllamaExport):
            problems += policy.ollama_problems(export, f"{field}.server")
        if export.file_quantization in K_QUANTS:
            problems += await _k_quant_problems(session, f"{field}.quantization")
    return problems


async def _k_quant_problems(session: AsyncSession, field: str) -> list[FieldProblem]:
    alive = await workers.alive(session, Queue.EXPORTS)
    if not alive or any(LLAMA_QUANTIZE in worker.versions for worker in alive):
        return []  # with none alive nobody knows yet
    message = (
        "no export worker has llama-quantize, which K-quants need: run "
        "scripts/build-llama-quantize there, or choose q8_0"
    )
    return [FieldProblem(field=field, message=message)]
