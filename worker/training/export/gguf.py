"""Convert a model directory with llama.cpp's own converter, and run what comes out."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dressage.spec.status import Reason
from worker.training.failures import RunFailure

log = logging.getLogger(__name__)

ENTRY = Path(__file__).with_name("convert_entry.py")
SENTENCES = {
    "BPE pre-tokenizer was not recognized": "llama.cpp does not know the pre-tokenizer of this "
    "model: it recognises published tokenizers only, not retrained ones",
    "Model architecture": "llama.cpp does not support this model's architecture",
    "not supported": "llama.cpp does not support this model",
}


def converter_path() -> Path:
    """Where llama.cpp's converter lies: `LLAMA_CPP_PATH`, or what `scripts/setup` fetched.

    Raises:
        RunFailure: In neither place.
    """
    chosen = os.environ.get("LLAMA_CPP_PATH") or f"{sys.prefix}/share/dressage/llama.cpp"
    if not (Path(chosen) / "convert_hf_to_gguf.py").is_file():
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            f"llama.cpp's converter is not in {chosen}; run scripts/setup, or point LLAMA_CPP_PATH "
            "at a llama.cpp source tree",
        )
    return Path(chosen)


def convert(model: Path, out: Path, quantization: str) -> None:
    """Write a GGUF file.

    Raises:
        RunFailure: The converter refuses the model; its last lines become a sentence.
    """
    has_template = (model / "chat_template.jinja").is_file() or "chat_template" in json.loads(
        (model / "tokenizer_config.json").read_bytes()
    )
    if not has_template:  # the converter would exit with 0 and leave it out
        raise RunFailure(Reason.CONVERSION_FAILED, "the model has no chat template to put in GGUF")
    command = [
        *(sys.executable, str(ENTRY), str(converter_path()), str(model)),
        *("--outfile", str(out), "--outtype", quantization),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        tail = "\n".join(lines[-20:])
        log.warning("converter output:\n%s", tail)
        known = next((text for mark, text in SENTENCES.items() if mark in tail), None)
        raise RunFailure(
            Reason.CONVERSION_FAILED, known or f"llama.cpp's converter failed: {lines[-1:]}"
        )
    log.info("%s is %.1f MB", out.name, out.stat().st_size / 1e6)


class GgufModel:
    """A GGUF file loaded by llama.cpp, answering chats as a server would."""

    def __init__(self, path: Path, *, context_length: int) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context_length
        parameters.use_jinja = True
        parameters.verbosity = -1
        self._server = xllamacpp.Server(parameters)

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """One assistant message.

        Raises:
            RuntimeError: llama.cpp answers with an error.
        """
        request: dict[str, Any] = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        if tools:
            request["tools"] = tools
        answer = self._server.handle_chat_completions(request)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


def check_answers(
    path: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]], context_length: int
) -> None:
    """Load the file and ask it once.

    Raises:
        RunFailure: It does not load, or says nothing.
    """
    try:
        answer = GgufModel(path, context_length=context_length).chat(messages, tools)
    except RuntimeError as error:
        raise RunFailure(
            Reason.CONVERSION_FAILED, f"the GGUF file does not run: {error}"
        ) from error
    if not answer.get("content") and not answer.get("tool_calls"):
        raise RunFailure(Reason.CONVERSION_FAILED, "the GGUF file runs, but answers nothing")
    log.info("the GGUF file answers: %s", json.dumps(answer)[:300])
