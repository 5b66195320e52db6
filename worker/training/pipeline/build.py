"""Builds the parts of a run from its specification."""

import datetime
import importlib.util
import logging
import os
from collections.abc import Sequence

from transformers import AutoConfig, set_seed

from dressage.sandbox.pool import WorkerPool
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.evaluate import split
from worker.training.model import (
    context_length,
    end_ids,
    load_model,
    load_tokenizer,
    require_gpus,
)
from worker.training.pipeline.parts import Parts
from worker.training.process.failures import RunFailure
from worker.training.rewards.weighted import Scorer
from worker.training.rollout.engine import AgentParts, Engine, RolloutEngine, RolloutLimits
from worker.training.rollout.function import FunctionRollouts
from worker.training.rollout.template import ConversationTemplate
from worker.training.sampler.engine_process import EngineOptions
from worker.training.sampler.vllm import ENGINE, VllmSampler
from worker.training.update.config import require_reporters, require_targets, update_plan
from worker.training.update.trainer import JobTrainer, Prompts
from worker.wire.run_dir import RunDirectory

log = logging.getLogger(__name__)

MAX_LISTED = 20
ADDED_TOKENS = 2048  # of a prompt, by an environment's reset: known only when it is played
FEWEST_SEQUENCES, MOST_SEQUENCES = 64, 512  # that vLLM writes at the same time


def build(
    run: RunDirectory,
    job: JobSpec,
    pool: WorkerPool,
    cases: Sequence[Case],
    *,
    date: datetime.date,
) -> Parts:
    """Tokenizer, model, cases on their sides, engine, scorer and trainer.

    Raises:
        RunFailure: The model cannot be loaded or trained, something it needs is missing, or there
            are cases that it has no room for.
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
        date=date,
    )
    require_reporters(training)
    context = context_length(AutoConfig.from_pretrained(job.agent.model))
    cases, longest = _with_room(run, job, template, context, cases)
    first = tuple(template.prompt(cases[0].conversation(job.agent.instructions)))
    sampler = None
    if training.vllm:
        added = ADDED_TOKENS if job.agent.environment else 0
        room = min(context, longest + added + training.max_completion_length)
        context = min(context, training.vllm.max_model_len or room)
        sampler = _engine_sampler(job, template, context)
    if use_cpu and training.dtype != "float32":
        log.warning("training in %s on a CPU, which is slow; float32 is faster", training.dtype)
    model = load_model(
        job.agent.model,
        dtype=training.weights_dtype,
        use_cpu=use_cpu,
        in_4bit=training.load_in_4bit,
    )
    require_targets(training, model)
    log.info("attention: %s", model.config._attn_implementation)
    training_cases, held_out = split(cases, job.evaluation)
    engine = _engine(job, template, pool, context)
    scorer = Scorer(
        job.rewards,
        pool,
        timeout=training.tool_timeout,
        judge_key=os.environ.get("DRESSAGE_JUDGE_KEY"),
        seed=training.seed,
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
        plan=update_plan(training, gpus=job.resources.gpus),
        prompts=Prompts(longest, first),
        engine_sampler=sampler,
    )
    return Parts(template, pool, engine, scorer, trainer, training_cases, held_out, longest)


def _with_room(
    run: RunDirectory,
    job: JobSpec,
    template: ConversationTemplate,
    context: int,
    cases: Sequence[Case],
) -> tuple[Sequence[Case], int]:
    """The cases whose prompts leave room for an answer, and the tokens of the longest prompt.

    What environments add comes on top.

    Raises:
        RunFailure: There are others, and the job does not say that they may be dropped.
    """
    lengths = {
        case.id: len(template.prompt(case.conversation(job.agent.instructions))) for case in cases
    }
    marked = [c.id for c in cases if template.control_tokens_in(c.conversation(None))]
    if marked:
        message = (
            f"{len(marked)} cases have the text of control tokens in their input, which the model "
            f"reads as such: {', '.join(map(repr, marked[:MAX_LISTED]))}"
        )
        run.emit(EventType.WARNING, code="control_tokens", message=message)
    too_long = {id_: length for id_, length in lengths.items() if length >= context}
    if not too_long:
        return cases, max(lengths.values())
    listed = ", ".join(f"{id_!r} ({tokens})" for id_, tokens in list(too_long.items())[:MAX_LISTED])
    more = f" and {len(too_long) - MAX_LISTED} more" if len(too_long) > MAX_LISTED else ""
    message = (
        f"{len(too_long)} of {len(cases)} cases have prompts that leave no room in the model's "
        f"context of {context} tokens: {listed}{more}"
    )
    if job.training.too_long_cases == "refuse":
        raise RunFailure(
            Reason.SUITE_INVALID,
            f"{message}. Shorten them, or set training.too_long_cases to drop",
        )
    run.emit(EventType.WARNING, code="cases_dropped", message=f"dropped: {message}")
    kept = [case for case in cases if case.id not in too_long]
    if not split(kept, job.evaluation)[0]:
        raise RunFailure(Reason.SUITE_INVALID, f"no case is left for training: {message}")
    return kept, max(lengths[case.id] for case in kept)


def _engine_sampler(job: JobSpec, template: ConversationTemplate, length: int) -> VllmSampler:
    """vLLM, loaded before the trainer's model takes memory: it measures what is free.

    Raises:
        RunFailure: It is not there, or does not load.
    """
    training, spec = job.training, job.training.vllm
    assert spec
    if ENGINE.startswith("worker.") and importlib.util.find_spec("vllm") is None:
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            "training.vllm needs the package vllm on the worker; leave it out, or send the job to "
            "a worker that has it",
        )
    log.info("vLLM is loaded for %d tokens of prompt and completion", length)
    in_flight = training.rollouts_per_step * (1 + training.max_staleness)
    return VllmSampler(
        EngineOptions(
            model=job.agent.model,
            dtype=training.dtype,
            end_ids=tuple(sorted(end_ids(job.agent.model, template.tokenizer))),
            max_model_len=length,
            gpu_memory_utilization=spec.gpu_memory_utilization,
            tensor_parallel_size=spec.tensor_parallel_size,
            max_num_seqs=min(max(in_flight, FEWEST_SEQUENCES), MOST_SEQUENCES),
            seed=training.seed,
            sleeps=spec.sleep,
        ),
        factory=ENGINE,
    )


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
            needs_mask=bool(training.echo and training.echo.coeff),
            seed=training.seed,
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
