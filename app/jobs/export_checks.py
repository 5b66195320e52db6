"""What can be known about exports before a worker spends time on them."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.exceptions import FieldProblem
from app.jobs.rules import OperatorRules
from app.queue.doorbell import Queue
from app.workers import repository as workers
from dressage.spec.export import K_QUANTS, GgufAdapterExport, GgufExport, OllamaExport
from dressage.spec.job import JobSpec

LLAMA_QUANTIZE = "llama-quantize"  # among the versions that a worker reports


async def export_problems(
    session: AsyncSession, rules: OperatorRules, spec: JobSpec
) -> list[FieldProblem]:
    """Exports that no worker here can make, or that are not allowed."""
    problems = []
    for at, export in enumerate(spec.exports):
        field = f"exports.{at}"
        if isinstance(export, GgufAdapterExport) and not (
            spec.training.lora or spec.training.load_in_4bit
        ):
            message = "the job trains no adapter: set training.lora, or export gguf"
            problems.append(FieldProblem(field=f"{field}.type", message=message))
        if isinstance(export, OllamaExport):
            problems += rules.ollama_problems(export, f"{field}.server")
        if isinstance(export, GgufExport | OllamaExport) and export.quantization in K_QUANTS:
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
