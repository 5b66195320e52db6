"""Builds the parts of a run from its specification."""

import logging
import os

from transformers import set_seed

from dressage.sandbox.pool import WorkerPool
from dressage.spec.job import JobSpec
from dressage.spec.suite import Case
from worker.training.model import (
    context_length,
    end_ids,
    load_model,
    load_tokenizer,
    require_gpus,
)
from worker.training.pipeline.parts import Parts
from worker.training.rewards.weighted import Scorer
from worker.training.rollout.engine import AgentParts, Engine, RolloutEngine, RolloutLimits
from worker.training.rollout.function import FunctionRollouts
from worker.training.rollout.template import ConversationTemplate
from worker.training.update.config import require_reporters
from worker.training.update.trainer import JobTrainer
from worker.wire.run_dir import RunDirectory

log = logging.getLogger(__name__)


def build(run: RunDirectory, job: JobSpec, pool: WorkerPool, training_cases: list[Case]) -> Parts:
    """Tokenizer, model, engine, scorer and trainer.

    Raises:
        RunFailure: The model cannot be loaded or trained, or something it needs is missing.
    """
    use_cpu = job.resources.gpus == 0
    if not use_cpu:
        require_gpus(job.resources.gpus)
    training = job.training
    tokenizer = load_tokenizer(job.agent.model)
    template = ConversationTemplate(
        tokenizer,
        job.agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments),
        end_ids=end_ids(job.agent.model, tokenizer),
        response_template=job.agent.response_template,
        thinking=job.agent.thinking,
    )
    require_reporters(training)
    if use_cpu and training.dtype != "float32":
        log.warning("training in %s on a CPU, which is slow; float32 is faster", training.dtype)
    model = load_model(
        job.agent.model, dtype=training.dtype, use_cpu=use_cpu, in_4bit=training.load_in_4bit
    )
    engine = _engine(job, template, pool, context_length(model.config))
    scorer = Scorer(
        job.rewards,
        pool,
        timeout=training.tool_timeout,
        judge_key=os.environ.get("DRESSAGE_JUDGE_KEY"),
    )
    set_seed(training.seed)  # the adapter's first weights
    trainer = JobTrainer(
        model=model,
        tokenizer=template.tokenizer,
        spec=training,
        cases=training_cases,
        engine=engine,
        scorer=scorer,
        run=run,
        use_cpu=use_cpu,
    )
    return Parts(template.tokenizer, pool, engine, scorer, trainer)


def _engine(
    job: JobSpec, template: ConversationTemplate, pool: WorkerPool, context_tokens: int
) -> Engine:
    training = job.training
    if job.agent.rollout_func:
        return FunctionRollouts(
            name=job.agent.rollout_func,
            template=template,
            instructions=job.agent.instructions,
            pool=pool,
            completion_tokens=training.max_completion_length,
            timeout=training.tool_timeout,
        )
    return RolloutEngine(
        template=template,
        agent=AgentParts(job.agent.instructions, job.agent.environment, training.seed),
        pool=pool,
        limits=RolloutLimits(
            completion_tokens=training.max_completion_length,
            context_tokens=context_tokens,
            tool_iterations=training.max_tool_iterations,
            tool_timeout=training.tool_timeout,
            tool_output=training.max_tool_output,
        ),
    )
