"""Asks a trained agent, with the template, tools and sandbox it was trained with."""

import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dressage.authoring.suite import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.spec.artifact import ArtifactKind
from dressage.spec.generation import GeneratedAnswer, GenerationSpec
from dressage.spec.job import JobSpec
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.export.agent import shown_tools
from worker.training.export.served import agent_template
from worker.training.model import context_length, load_model
from worker.training.process.failures import RunFailure
from worker.training.process.user_code import user_code
from worker.training.rollout.engine import AgentParts, RolloutEngine, RolloutLimits
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Draws, Sampling

WORKERS = 4
OBSERVED_TOKENS = 4096  # room for what tools answer, beside what the model writes
THINKING = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def answer(
    job: JobSpec, request: GenerationSpec, trained: Path, kind: ArtifactKind, suite: Suite
) -> GeneratedAnswer:
    """One conversation with the trained model.

    Raises:
        RunFailure: The suite's code or the model cannot be loaded.
    """
    use_cpu = not torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    if kind is ArtifactKind.ADAPTER:
        base = load_model(job.agent.model, dtype=job.training.dtype, use_cpu=use_cpu)
        model: Any = PeftModel.from_pretrained(base, trained)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            trained, dtype=getattr(torch, job.training.dtype)
        )
        model = model if use_cpu else model.to("cuda")
    with user_code(suite, network=job.resources.network, size=WORKERS) as pool:
        return _conversation(job, request, suite, pool, model, tokenizer, trained)


def _conversation(
    job: JobSpec,
    request: GenerationSpec,
    suite: Suite,
    pool: WorkerPool,
    model: Any,
    tokenizer: Any,
    trained: Path,
) -> GeneratedAnswer:
    if request.tools is None:
        agent = job.agent
        tools = shown_tools(agent, trained, pool)
    else:
        agent = job.agent.model_copy(update={"tools": request.tools, "environment": None})
        tools = agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments)
    template = agent_template(job.agent, tokenizer, tools)
    turns = job.training.max_tool_iterations if request.execute_tools else 0
    instructions = job.agent.instructions if request.instructions is None else request.instructions
    engine = RolloutEngine(
        template=template,
        agent=AgentParts(
            instructions or None,
            agent.environment,
            request.seed,
        ),
        pool=pool,
        limits=RolloutLimits(
            completion_tokens=request.max_new_tokens * (turns + 1) + OBSERVED_TOKENS * turns,
            context_tokens=context_length(model.config),
            turn_tokens=request.max_new_tokens,
            tool_iterations=turns,
            tool_timeout=job.training.tool_timeout,
            tool_output=job.training.max_tool_output,
        ),
    )
    sampling = Sampling(request.temperature, repetition_penalty=request.repetition_penalty)
    sampler = TransformersSampler(model, tokenizer)
    (rollout,) = engine.play([(_case(request, suite), 0)], sampler, Draws(sampling, request.seed))
    if rollout.worker:
        rollout.worker.kill()
    if rollout.lost is not None:
        raise RunFailure(Reason.USER_CODE_ERROR, f"the environment was lost: {rollout.lost}")
    last = rollout.messages[-1] if rollout.messages[-1]["role"] == "assistant" else {}
    text = str(last.get("content") or "")
    thought = THINKING.match(text)
    made = [
        {"name": c.name, "arguments": c.arguments, "result": c.result, "error": c.error}
        for c in rollout.tool_calls
    ]
    wanted = [call["function"] for call in last.get("tool_calls") or []]
    return GeneratedAnswer(
        answer=text[thought.end() :] if thought else text,
        thinking=last.get("reasoning_content") or (thought.group(1).strip() if thought else None),
        tool_calls=(*made, *wanted),
        messages=tuple(rollout.messages),
        stop_reason=str(rollout.stop_reason),
        prompt_tokens=len(rollout.prompt_ids),
        completion_tokens=len(rollout.completion_ids),
    )


def _case(request: GenerationSpec, suite: Suite) -> Case:
    if request.case_id is not None:
        return next(case for case in suite.cases if case.id == request.case_id)
    return Case(id="request", input=request.messages or request.prompt or "")
