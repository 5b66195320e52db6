"""Convert a model directory with llama.cpp's own converter, and run what comes out."""

import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import snapshot_download

from dressage.spec.chat import Message, ToolSchema
from dressage.spec.export import CONVERTED, K_QUANTS
from dressage.spec.status import Reason
from worker.training.export.answers import ServedAnswer, is_empty, with_object_arguments
from worker.training.export.disk import require_room
from worker.training.process.failures import RunFailure
from worker.wire.programs import converter_folder, quantize_path

log = logging.getLogger(__name__)

RENDER_SECONDS = 60.0
LISTED_TOKENS = 40  # of the distribution that is compared
ENTRY = Path(__file__).with_name("convert_entry.py")
SENTENCES = (
    (
        r"BPE pre-tokenizer was not recognized",
        "llama.cpp does not know the pre-tokenizer of this model: it recognises published "
        "tokenizers only, not retrained ones",
    ),
    (
        r"< vocab_size",
        "the tokenizer has more tokens than the model has embeddings: tokens were added to it, and "
        "the model was not resized",
    ),
    (
        r"(?:Model|Architecture) '?(\w+)'? (?:is )?not supported",
        r"llama.cpp does not support the architecture \1",
    ),
    (
        r"Can not map tensor '([^']+)'",
        r"the model has a weight that its architecture has not in llama.cpp: \1",
    ),
    (
        r"lm_head is present in adapter",
        "the adapter changes the output layer, which this base shares with its embeddings: "
        "llama.cpp cannot express that; export gguf",
    ),
    (
        r"Quant(?:\w+ )?method is not yet supported: '?(\w+)",
        r"the base's weights are stored as \1, which llama.cpp's converter cannot read; use the "
        "model as it was published",
    ),
    (r"Missing or incomplete model files", "files of the model are missing or cut off"),
)


def convert(model: Path, out: Path, quantization: str, metadata: Mapping[str, str]) -> None:
    """Write a GGUF file; a K-quant by way of bf16.

    Args:
        model: A directory with a whole model.
        out: The file to make.
        quantization: Of `dressage.spec.export`.
        metadata: Where the model is from; becomes `dressage.…` entries of the file.

    Raises:
        RunFailure: The converter refuses the model; its last lines become a sentence.
    """
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    require_room(out.parent, size * (3 if quantization in K_QUANTS else 2), "the conversion")
    if quantization in CONVERTED:
        _convert(model, out, quantization, metadata)
        return
    program = quantize_path()
    if program is None:
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            "K-quants need llama-quantize on the worker: scripts/build-llama-quantize makes it",
        )
    whole = out.with_name(f".{out.name}.bf16")
    try:
        _convert(model, whole, "bf16", metadata)
        command = [str(program), str(whole), str(out), quantization.upper()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()][-3:]
            raise RunFailure(Reason.CONVERSION_FAILED, f"llama-quantize failed: {lines}")
    finally:
        whole.unlink(missing_ok=True)


def convert_base(base: str, adapter: Path, out: Path) -> None:
    """Write an adapter's base as q8_0, with the tokenizer and template that the adapter has.

    Raises:
        RunFailure: The converter refuses the base.
    """
    folder = Path(base)
    if not folder.is_dir():
        folder = Path(snapshot_download(base, allow_patterns=["*.json", "*.safetensors"]))
    with tempfile.TemporaryDirectory(dir=out.parent) as mixed:
        weights = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
        own = [path for path in adapter.iterdir() if not path.name.startswith("adapter_")]
        for path in [*weights, *own]:
            link = Path(mixed) / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
        convert(Path(mixed), out, "q8_0", {})


def convert_adapter(adapter: Path, base: str, out: Path, quantization: str) -> None:
    """Write a LoRA adapter as GGUF.

    Raises:
        RunFailure: It is of a kind that the converter gets wrong, or it fails.
    """
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    for field in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(field):  # the converter would exit with 0 and write a wrong file
            raise RunFailure(
                Reason.CONVERSION_FAILED,
                f"llama.cpp cannot express an adapter with {field}; export the merged model",
            )
    script = _converter() / "convert_lora_to_gguf.py"
    where = ["--base", base] if Path(base).is_dir() else ["--base-model-id", base]
    with tempfile.TemporaryDirectory() as folder:
        # Without the card, and with the base's name alone: both hold paths of this host.
        config["base_model_name_or_path"] = base if where[0] != "--base" else Path(base).name
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        weights = "adapter_model.safetensors"
        (Path(folder) / weights).symlink_to((adapter / weights).resolve())
        command = [
            *(sys.executable, str(script), *where, "--outfile", str(out)),
            *("--outtype", quantization, folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        raise _refusal(done.stderr)


def _convert(model: Path, out: Path, quantization: str, metadata: Mapping[str, str]) -> None:
    has_template = (model / "chat_template.jinja").is_file() or "chat_template" in json.loads(
        (model / "tokenizer_config.json").read_bytes()
    )
    if not has_template:  # the converter would exit with 0 and leave it out
        raise RunFailure(Reason.CONVERSION_FAILED, "the model has no chat template to put in GGUF")
    command = [
        *(
            sys.executable,
            str(ENTRY),
            str(_converter()),
            json.dumps(dict(metadata)),
            str(model),
        ),
        *("--outfile", str(out), "--outtype", quantization),
        *(("--model-name", metadata["job_name"]) if metadata.get("job_name") else ()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        raise _refusal(done.stderr)
    log.info("%s is %.1f MB", out.name, out.stat().st_size / 1e6)


def _converter() -> Path:
    folder = converter_folder()
    if not (folder / "convert_hf_to_gguf.py").is_file():
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            f"llama.cpp's converter is not in {folder}; run scripts/setup, or point LLAMA_CPP_PATH "
            "at a llama.cpp source tree",
        )
    return folder


def _refusal(output: str) -> RunFailure:
    lines = [line for line in output.splitlines() if line.strip()]
    tail = "\n".join(lines[-20:])
    log.warning("converter output:\n%s", tail)
    if "No space left on device" in tail:
        return RunFailure(Reason.DISK_FULL, "the disk became full during the conversion")
    for pattern, sentence in SENTENCES:
        found = re.search(pattern, tail)
        if found:
            return RunFailure(Reason.CONVERSION_FAILED, found.expand(sentence))
    said = lines[-1] if lines else "it said nothing"
    return RunFailure(Reason.CONVERSION_FAILED, f"llama.cpp's converter failed: {said}")


class GgufModel:
    """A GGUF file loaded by llama.cpp, answering chats as a server would."""

    def __init__(
        self,
        path: Path,
        *,
        context_length: int,
        adapter: Path | None = None,
        chat_template: str | None = None,
    ) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context_length
        parameters.use_jinja = True
        if chat_template:
            parameters.chat_template = chat_template
        parameters.verbosity = -1
        if adapter:
            parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self._server = xllamacpp.Server(parameters)

    def chat(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> Message:
        """One assistant message.

        Raises:
            RuntimeError: llama.cpp answers with an error.
        """
        answer = self._complete(messages, tools, max_tokens, temperature, {})
        message: Message = answer["choices"][0]["message"]
        return message

    def respond(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        stop: list[str] | None = None,
        **options: Any,
    ) -> ServedAnswer:
        """One assistant message with what the server counted. Messages may hold arguments as text.

        Raises:
            RuntimeError: llama.cpp answers with an error.
        """
        if stop:
            options["stop"] = stop
        answer = self._complete(messages, tools, max_tokens, temperature, options)
        choice = answer["choices"][0]
        return ServedAnswer(
            message=with_object_arguments(choice["message"]),
            prompt_tokens=answer.get("usage", {}).get("prompt_tokens"),
            cut_off=choice.get("finish_reason") == "length",
        )

    def render(self, messages: list[Message], tools: list[ToolSchema], **options: Any) -> str:
        """The prompt that llama.cpp makes of a conversation, up to the assistant's turn.

        Raises:
            RuntimeError: Its template refuses it.
        """
        request: dict[str, Any] = {
            "messages": [_with_text_arguments(m) for m in messages],
            **options,
        }
        if tools:
            request["tools"] = tools
        address = f"{self._server.listening_address}/apply-template"
        answer = httpx2.post(address, json=request, trust_env=False, timeout=RENDER_SECONDS)
        if answer.status_code != httpx2.codes.OK:
            raise RuntimeError(f"llama.cpp: {answer.text[:500]}")
        return str(answer.json()["prompt"])

    def next_token(self, prefix: list[int]) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens, by token id."""
        listed = self.complete(prefix, LISTED_TOKENS)["choices"][0]["logprobs"]["content"][0]
        return {int(entry["id"]): float(entry["logprob"]) for entry in listed["top_logprobs"]}

    def complete(self, prompt: list[int] | str, listed: int) -> dict[str, Any]:
        """llama.cpp's answer to a prompt of tokens or text: one token, and the likeliest ones."""
        answer = self._server.handle_completions(
            {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": listed}
        )
        return _decoded(answer)

    def _complete(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        max_tokens: int,
        temperature: float,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "messages": [_with_text_arguments(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            **options,
        }
        if tools:
            request["tools"] = tools
        answer = _decoded(self._server.handle_chat_completions(request))
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        return answer


def _decoded(answer: Any) -> dict[str, Any]:
    return dict(json.loads(answer) if isinstance(answer, str | bytes) else answer)


def _with_text_arguments(message: Message) -> Message:
    """A message as the OpenAI API has it: the arguments of calls are JSON texts."""
    calls = [
        {
            "id": call.get("id", f"call_{at}"),
            "type": "function",
            "function": {
                **call["function"],
                "arguments": call["function"]["arguments"]
                if isinstance(call["function"]["arguments"], str)
                else json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for at, call in enumerate(message.get("tool_calls") or [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def loaded(path: Path, *, context_length: int, adapter: Path | None = None) -> GgufModel:
    """A file that llama.cpp can run.

    Raises:
        RunFailure: It cannot.
    """
    try:
        return GgufModel(path, context_length=context_length, adapter=adapter)
    except RuntimeError as error:
        raise RunFailure(
            Reason.CONVERSION_FAILED, f"the GGUF file does not load: {error}"
        ) from error


def check_answer(model: GgufModel, messages: list[Message], tools: list[ToolSchema]) -> None:
    """Ask once.

    Raises:
        RunFailure: It says nothing, or an error.
    """
    try:
        answer = model.chat(messages, tools)
    except RuntimeError as error:
        raise RunFailure(
            Reason.CONVERSION_FAILED, f"the GGUF file does not run: {error}"
        ) from error
    if is_empty(answer):
        raise RunFailure(Reason.CONVERSION_FAILED, "the GGUF file runs, but answers nothing")
    log.info("the GGUF file answers: %s", json.dumps(answer)[:300])
