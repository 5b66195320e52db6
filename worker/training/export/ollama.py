"""Register a GGUF in Ollama over its REST API, and ask it. No `ollama` program is needed here.

Protocol: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import contextlib
import json
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from dressage.spec.chat import Message, ToolSchema
from dressage.spec.export import without_secrets
from dressage.spec.status import Reason
from worker.training.export.answers import ServedAnswer, with_object_arguments
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)

CONNECT_SECONDS, SILENT_SECONDS = 10.0, 600.0  # a server may load a model before it says a word
CHUNK = 1 << 20
TOKEN, AUTHORITY = "DRESSAGE_OLLAMA_TOKEN", "DRESSAGE_OLLAMA_CA"  # of a server behind a proxy
LISTED = 20  # the most that Ollama gives


@dataclass(frozen=True)
class ModelShape:
    """What a server says of a model; None: it does not say."""

    layers: int | None
    width: int | None


@dataclass(frozen=True)
class NextText:
    """Log-probabilities by text, and how many tokens the server has made of the prompt."""

    prompt_tokens: int | None
    likeliest: dict[str, float]


class Ollama:
    """One server.

    Attributes:
        url: Its address, without a password.

    Every method raises `RunFailure`: `ollama_unavailable` when another try may help, else
    `ollama_refused`.
    """

    def __init__(self, url: str) -> None:
        timeout = httpx2.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        self.url = without_secrets(url)
        token, authority = os.environ.get(TOKEN), os.environ.get(AUTHORITY)
        self._http = httpx2.Client(
            base_url=url,
            timeout=timeout,
            follow_redirects=False,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=ssl.create_default_context(cafile=authority) if authority else True,
        )

    def version(self) -> str:
        """The server's version."""
        return str(self._json("GET", "/api/version")["version"])

    def has(self, name: str) -> bool:
        """Whether a model of this name is there; Ollama ignores case."""
        models = self._json("GET", "/api/tags").get("models") or []
        return full_name(name) in {full_name(str(model["name"])) for model in models}

    def upload(self, file: Path, sha256: str, progress: Callable[[str], None]) -> str:
        """Send a file, unless the server has it; the server checks it. Returns its digest."""
        digest = f"sha256:{sha256}"
        path = f"/api/blobs/{digest}"
        if self._send("HEAD", path, allow=(404,)).status_code == httpx2.codes.OK:
            progress(f"has {file.name} already")
            return digest
        size = file.stat().st_size
        with file.open("rb") as content:
            headers = {"Content-Length": str(size)}
            chunks = _told(iter(lambda: content.read(CHUNK), b""), size, progress)
            self._send("POST", path, content=chunks, headers=headers)
        return digest

    def create(self, request: Mapping[str, Any], progress: Callable[[str], None]) -> None:
        """Make a model. What went wrong after the first line comes as a line, not as a status."""
        status = ""
        for line in self._lines("/api/create", {**request, "stream": True}):
            if "error" in line:
                raise _refused(f"create: {line['error']}")
            if line.get("status") and line["status"] != status:
                status = str(line["status"])
                progress(status)
        if status != "success":
            raise _unavailable(f"{self.url} ended before it had made the model ({status!r})")

    def capabilities(self, name: str) -> list[str]:
        """What a model can do: `completion`, `tools` and others."""
        return list(self._show(name).get("capabilities") or [])

    def is_of_job(self, name: str, job_id: str) -> bool:
        """Whether a job has made a model: its file says so, or its license where it is an adapter.

        Not its digest: the server writes a file anew before it stores it.
        """
        told = self._show(name)
        own = (told.get("model_info") or {}).get("dressage.job") == job_id
        return own or mark_of(job_id) in str(told.get("license"))

    def shape(self, name: str) -> ModelShape:
        """Size of a model, as it says itself."""
        told = self._show(name).get("model_info") or {}
        architecture = told.get("general.architecture")
        return ModelShape(
            layers=told.get(f"{architecture}.block_count"),
            width=told.get(f"{architecture}.embedding_length"),
        )

    def next_text(self, name: str, prompt: str) -> NextText | None:
        """The likeliest texts of the next token after a prompt, sent as it is.

        None: the server does not give them, as for the end of a turn.
        """
        request = {
            "model": name,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "logprobs": True,
            "top_logprobs": LISTED,
            "options": {"num_predict": 1, "temperature": 0.0},
        }
        answer = self._json("POST", "/api/generate", json=request)
        if not answer.get("logprobs"):
            return None
        listed = answer["logprobs"][0].get("top_logprobs") or []
        return NextText(
            prompt_tokens=answer.get("prompt_eval_count"),
            likeliest={str(entry["token"]): float(entry["logprob"]) for entry in listed},
        )

    def render(self, name: str, messages: list[Message], tools: list[ToolSchema]) -> str | None:
        """The prompt of a conversation, as text; None: the server does not show it."""
        request = {"model": name, "messages": messages, "tools": tools, "stream": False}
        answer = self._json("POST", "/api/chat", json={**request, "_debug_render_only": True})
        found = (answer.get("_debug_info") or {}).get("rendered_template")
        return None if found is None else str(found)

    def delete(self, name: str) -> None:
        """Remove a model, if it is there, also from memory."""
        with contextlib.suppress(RunFailure):
            self._send("POST", "/api/generate", json={"model": name, "keep_alive": 0}, allow=(404,))
        self._send("DELETE", "/api/delete", json={"model": name}, allow=(404,))

    def chat(
        self,
        name: str,
        messages: list[Message],
        tools: list[ToolSchema],
        *,
        think: bool | None,
        options: Mapping[str, Any],
    ) -> ServedAnswer:
        """One assistant message, not streamed."""
        request: dict[str, Any] = {
            "model": name,
            "messages": messages,
            "stream": False,
            "options": dict(options),
        }
        if think is not None:
            request["think"] = think
        if tools:
            request["tools"] = tools
        answer = self._json("POST", "/api/chat", json=request)
        return ServedAnswer(
            message=with_object_arguments(answer["message"]),
            prompt_tokens=answer.get("prompt_eval_count"),
            cut_off=answer.get("done_reason") == "length",
        )

    def _show(self, name: str) -> dict[str, Any]:
        return self._json("POST", "/api/show", json={"model": name})

    def _lines(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    raise self._failure(response)
                for line in response.iter_lines():
                    if line.strip():
                        yield json.loads(line)
        except (httpx2.TransportError, ValueError) as error:
            raise _unavailable(f"{self.url} broke off: {error or type(error).__name__}") from error

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        response = self._send(method, path, **options)
        try:
            return dict(response.json())
        except ValueError as error:
            raise _unavailable(f"{self.url} does not answer as Ollama does") from error

    def _send(
        self, method: str, path: str, *, allow: tuple[int, ...] = (), **options: Any
    ) -> httpx2.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx2.TransportError as error:
            raise _unavailable(
                f"{self.url} does not answer: {error or type(error).__name__}"
            ) from error
        if response.status_code >= 300 and response.status_code not in allow:
            raise self._failure(response)
        return response

    def _failure(self, response: httpx2.Response) -> RunFailure:
        try:
            said = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            said = response.text[:300] or f"status {response.status_code}"
        text = f"{self.url}: {said}"
        return _unavailable(text) if response.status_code >= 500 else _refused(text)


def _told(chunks: Iterator[bytes], size: int, progress: Callable[[str], None]) -> Iterator[bytes]:
    """Pass chunks on, and report every tenth of the whole."""
    sent, said = 0, 0
    for chunk in chunks:
        yield chunk
        sent += len(chunk)
        if sent * 10 // size > said:
            said = sent * 10 // size
            progress(f"uploaded {said * 10} % of {size / 1e6:.1f} MB")


def mark_of(job_id: str) -> str:
    """What is written into a model's license, to know again who has made it."""
    return f"dressage.job {job_id}"


def full_name(name: str) -> str:
    """A model's name with its tag, in lower case, as the server compares them."""
    return (name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest").lower()


def _refused(text: str) -> RunFailure:
    return RunFailure(Reason.OLLAMA_REFUSED, f"Ollama: {text}")


def _unavailable(text: str) -> RunFailure:
    return RunFailure(Reason.OLLAMA_UNAVAILABLE, f"Ollama: {text}")
