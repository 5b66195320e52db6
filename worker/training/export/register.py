"""Registers a file under a name in Ollama, if what is served there is what was trained."""

import hashlib
import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import AutoConfig

from dressage.spec.chat import Message, ToolSchema
from dressage.spec.event import EventType
from dressage.spec.export import OllamaExport
from dressage.spec.status import Reason
from worker.training.export.agent import TrainedAgent
from worker.training.export.answers import ServedAnswer, is_empty
from worker.training.export.ollama import Ollama, full_name, mark_of
from worker.training.export.parity import NextToken
from worker.training.model import end_ids
from worker.training.process.failures import RunFailure
from worker.wire.export_spec import ExportRunSpec
from worker.wire.run_dir import ProducedFile, RunDirectory

log = logging.getLogger(__name__)

OLDEST_OLLAMA = (0, 30)  # the first that uses the template inside the GGUF
NO_ADAPTERS = (0, 34, 1)  # the first that makes no new model with an adapter
LEAST_CONTEXT = 4096  # what Ollama gives a model without a GPU, if it may


def ready_server(spec: ExportRunSpec, export: OllamaExport) -> Ollama:
    """The server, asked before anything is converted for it.

    Raises:
        RunFailure: It cannot take the model.
    """
    if spec.ollama_url is None:
        raise RunFailure(
            Reason.OLLAMA_REFUSED, "the operator has named no Ollama server (DRESSAGE_OLLAMA_URLS)"
        )
    server = Ollama(spec.ollama_url)
    version = server.version()
    numbers = _numbers(version)
    built_here = numbers[:2] == (0, 0)  # what a self-built server calls itself: tried
    if numbers < OLDEST_OLLAMA and not built_here:
        raise RunFailure(
            Reason.OLLAMA_REFUSED,
            f"Ollama {version} does not use the chat template inside a GGUF, so what it served "
            f"would not be what was trained; {'.'.join(map(str, OLDEST_OLLAMA))} or newer does",
        )
    if spec.attempt == 1:
        _require_free_name(server, export, spec)
    if export.base and numbers >= NO_ADAPTERS:
        raise RunFailure(
            Reason.OLLAMA_REFUSED,
            f"Ollama {version} makes no new models of a base with an adapter; leave base out, and "
            "the whole model is sent",
        )
    if export.base:
        _require_base(server, export.base, spec.job.agent.model)
    return server


def register(
    run: RunDirectory,
    spec: ExportRunSpec,
    export: OllamaExport,
    server: Ollama,
    file: ProducedFile,
    agent: TrainedAgent,
) -> dict[str, Any]:
    """Make the model under a name nobody uses, look at it, and only then under its own.

    Returns:
        What was made, for the export's result.

    Raises:
        RunFailure: The server refuses it or is away, or it is not what was trained.
    """

    def say(status: str) -> None:
        run.emit(EventType.LOG, level="info", message=f"Ollama: {status}")

    digest = server.upload(run.artifacts / file.name, file.sha256, say)
    _require_free_name(server, export, spec)  # somebody may have taken it meanwhile
    sent = {file.name: digest}
    request = {
        **({"from": export.base, "adapters": sent} if export.base else {"files": sent}),
        "parameters": _parameters(run, export, agent),
        **({"system": spec.job.agent.instructions} if export.system_prompt else {}),
        # An adapter's own entries are not shown: the base's are.
        **({"license": mark_of(spec.job_id)} if export.base else {}),
    }

    with _staged(server, export, spec.job_id) as staging:
        server.create({"model": staging, **request}, say)
        capabilities = server.capabilities(staging)
        if agent.tools and "tools" not in capabilities:
            raise RunFailure(
                Reason.OLLAMA_REFUSED,
                "Ollama does not see tools in the chat template of this model, but the agent has "
                "some",
            )
        limit = spec.job.training.max_completion_length
        # As it was trained: Ollama lets a model think that can, unless it is told not to.
        think = spec.job.agent.thinking if "thinking" in capabilities else None

        def chat(messages: list[Message], tools: list[ToolSchema]) -> ServedAnswer:
            options = {"temperature": 0.0, "num_predict": limit}
            return server.chat(staging, messages, tools, think=think, options=options)

        if agent.is_compared:
            agent.compare(
                f"ollama:{export.name}",
                chat,
                _next_token(server, staging, agent),
                partial(server.render, staging),
            )
            _require_known_adapter(export, agent)
            stop_at_problems(export, agent)
        else:
            _require_answer(chat(agent.probes()[0], agent.tools))
        server.create({"model": export.name, **request}, say)
    return {
        "server": server.url,
        "name": export.name,
        "digest": digest,
        "base": export.base,
        "parameters": request["parameters"],
        "think": think,
        "curl": _call(server, export, agent, think),
    }


def stop_at_problems(export: OllamaExport, agent: TrainedAgent) -> None:
    """Do not register what differs from what was trained, unless the job said so.

    Raises:
        RunFailure: A report has problems.
    """
    report = next((report for report in agent.reports if report.problems), None)
    if report and export.on_problem == "refuse":
        raise RunFailure(
            Reason.PARITY_FAILED,
            f"{report.served} is not what was trained: {', '.join(report.problems)}; it was not "
            "registered (set on_problem to flag to register it all the same)",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split(".")[:3] if part.isdigit())


def _require_known_adapter(export: OllamaExport, agent: TrainedAgent) -> None:
    """Whether the server has dropped the adapter must be known where it could.

    Raises:
        RunFailure: It is not, and the job did not say that this is fine.
    """
    if export.base and export.on_problem == "refuse" and agent.reports[-1].kl is None:
        raise RunFailure(
            Reason.PARITY_FAILED,
            f"whether {export.base!r} is served with the adapter could not be found out: "
            f"{'; '.join(agent.reports[-1].notes)}",
        )


def _require_free_name(server: Ollama, export: OllamaExport, spec: ExportRunSpec) -> None:
    """A model that this job has registered itself is no obstacle: it is replaced."""
    if export.overwrite or not server.has(export.name):
        return
    if server.is_of_job(export.name, spec.job_id):
        return
    raise RunFailure(
        Reason.OLLAMA_REFUSED,
        f"{server.url} has a model {full_name(export.name)!r}; choose another name, or set "
        "overwrite",
    )


def _require_base(server: Ollama, name: str, base: str) -> None:
    """Never pulled by us: gigabytes, onto somebody's server."""
    if not server.has(name):
        raise RunFailure(
            Reason.OLLAMA_REFUSED, f"the server has no model {full_name(name)!r}; pull it there"
        )
    config = AutoConfig.from_pretrained(base).get_text_config()
    found, wanted = server.shape(name), (config.num_hidden_layers, config.hidden_size)
    if None not in (found.layers, found.width) and (found.layers, found.width) != wanted:
        raise RunFailure(
            Reason.OLLAMA_REFUSED,
            f"{full_name(name)!r} on the server is not the job's base {base!r}: it has "
            f"{found.layers} layers of width {found.width}, the base {wanted[0]} of {wanted[1]}",
        )


def _parameters(run: RunDirectory, export: OllamaExport, agent: TrainedAgent) -> dict[str, Any]:
    """As it was proved: every stop token, the sampling and length of the evaluation, enough room.

    A conversation goes on where the job's cases ended, so what these need is the least: a prompt
    that does not fit loses its beginning without a word.
    """
    ends = end_ids(agent.job.agent.model, agent.tokenizer)
    stops = sorted(token for token in map(agent.tokenizer.decode, ends) if token.strip())
    training, evaluation = agent.job.training, agent.job.evaluation
    proved_at = training.temperature if evaluation.temperature is None else evaluation.temperature
    context = export.num_ctx or min(max(agent.context, LEAST_CONTEXT), agent.fits)
    if context > agent.fits:
        message = f"num_ctx is {context}, and the model holds {agent.fits} tokens"
        run.emit(EventType.WARNING, code="num_ctx", message=message)
    return {
        "num_ctx": context,
        "stop": stops,
        "temperature": proved_at if export.temperature is None else export.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "repeat_penalty": 1.0,
        "num_predict": training.max_completion_length,
    }


def _call(server: Ollama, export: OllamaExport, agent: TrainedAgent, think: bool | None) -> str:
    """A command that asks the agent as it was trained, with its tools."""
    request: dict[str, Any] = {
        "model": export.name,
        "messages": agent.probes()[0],
        "tools": agent.tools,
        "stream": False,
        **({} if think is None else {"think": think}),
    }
    body = json.dumps(request, ensure_ascii=False)
    return f"curl {server.url}/api/chat -d {shlex.quote(body)}"


def _next_token(server: Ollama, name: str, agent: TrainedAgent) -> NextToken:
    """Ollama takes and gives texts; these are the tokens behind them."""
    tokenizer = agent.tokenizer
    ids: dict[str, int] = {}
    for token in range(len(tokenizer)):
        ids.setdefault(tokenizer.decode([token]), token)
    first = tokenizer.bos_token_id

    def ask(prefix: list[int]) -> dict[int, float] | None:
        # A server may put the first token before a prompt: the file's `add_bos_token` decides.
        variants = [prefix, prefix[1:]] if prefix[0] == first else [prefix]
        said = None
        for own in variants:
            try:
                said = server.next_text(name, tokenizer.decode(own))
            except RunFailure as failure:  # less to compare is no reason to refuse a model
                log.warning("no distribution: %s", failure.message)
                return None
            if said is None or said.prompt_tokens in (None, len(prefix)):
                break
        if said is None or said.prompt_tokens not in (None, len(prefix)):
            return None
        return {ids[text]: value for text, value in said.likeliest.items() if text in ids}

    return ask


def _require_answer(answer: ServedAnswer) -> None:
    if is_empty(answer.message):
        raise RunFailure(Reason.OLLAMA_REFUSED, "Ollama runs the model, but it answers nothing")


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
