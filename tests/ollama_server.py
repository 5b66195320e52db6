"""A small server that speaks Ollama's documented REST API strictly, and really runs the GGUF.

All that we believe about Ollama (0.30 and newer) stands here, in one place:
names, digests, streamed statuses with errors as lines, replacement of names without regard to case,
a base on the server with one adapter, the GGUF's own Jinja template, capabilities read from it,
arguments of calls as objects, log-probabilities by text for raw prompts. As in 0.32.15: tools come
out in its own order and without what it does not know, a stored layer has another digest than the
file that was sent, a prompt beyond num_ctx loses its oldest messages, what a model does not say is
drawn with Ollama's defaults, and `_debug_render_only` shows the prompt.
"""

import hashlib
import json
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2

from worker.training.export.gguf import GgufModel

PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
NAME = re.compile(rf"(?:{PART}/)?(?:{PART}/)?{PART}(?::{PART})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PARAMETERS = {
    "num_ctx": int,
    "temperature": float,
    "num_predict": int,
    "top_p": float,
    "top_k": int,
    "repeat_penalty": float,
    "stop": list,
}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.0, "num_ctx": 4096}
OF_PARAMETERS = ("type", "$defs", "items", "required", "properties")
OF_PROPERTY = ("anyOf", "type", "items", "description", "enum", "properties", "required")


class OllamaServer:
    """`with OllamaServer(folder) as server:` then `server.url`.

    Attributes:
        models: What was made, by lower-case name with tag.
        fault: What goes wrong next: `cut upload`, `cut create`, `full`, `slow`,
            `error line`, `busy`.
        asked: Every request as (method, path).
        thinks: Whether models that are made now can think.
        thought: `think` of every chat.
        unloaded: Names that were to leave the memory.
    """

    def __init__(self, folder, version="0.32.15"):
        self.blobs = folder
        self.version = version
        self.models, self.asked, self.fault = {}, [], None
        self.thinks, self.thought, self.unloaded = False, [], []
        self._loaded, self._lock = {}, threading.Lock()
        server = self

        class Handler(_Handler):
            ollama = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def take_fault(self, name):
        if self.fault == name:
            self.fault = None
            return True
        return False

    def answer(self, model, request):
        made = self.models[model]
        with self._lock:
            loaded = self._load(made)
            options = {**DEFAULTS, **made["parameters"], **request.get("options", {})}
            messages = self._messages(made, request)
            tools = [as_ollama_has(tool) for tool in request.get("tools") or []]
            if request.get("_debug_render_only"):
                return loaded.render(messages, tools)
            while len(messages) > 1 and loaded.tokens(messages, tools) > options["num_ctx"]:
                del messages[0]
            return loaded.respond(
                messages,
                tools,
                max_tokens=options.get("num_predict", -1),
                temperature=options["temperature"],
                stop=options.get("stop"),
                **{name: options[name] for name in ("top_k", "top_p", "repeat_penalty")},
            )

    def _messages(self, made, request):
        messages = [dict(message) for message in request["messages"]]
        if made["system"] and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": made["system"]})
        for at, message in enumerate(messages):
            calls = []
            for number, call in enumerate(message.get("tool_calls") or []):
                function = call["function"]
                assert isinstance(function["arguments"], dict), "arguments must be an object"
                own = {"id": f"call_{at}_{number}", "type": "function"}
                text = json.dumps(function["arguments"])
                calls.append({**call, **own, "function": {**function, "arguments": text}})
            if calls:
                message["tool_calls"] = calls
        return messages

    def complete(self, model, request):
        """The next token after a raw prompt, with the likeliest ones as texts."""
        with self._lock:
            loaded = self._load(self.models[model])
            return loaded.complete(request["prompt"], request["top_logprobs"])

    def blob(self, digest):
        return self.blobs / digest.removeprefix("sha256:")

    def _load(self, made):
        """One model at a time, as on a small machine."""
        wanted = (made["digest"], made.get("adapter"))
        if wanted not in self._loaded:
            self._loaded = {
                wanted: CountingModel(
                    self.blob(made["digest"]),
                    context_length=made["parameters"].get("num_ctx", 4096),
                    adapter=self.blob(made["adapter"]) if made.get("adapter") else None,
                )
            }
        return self._loaded[wanted]


class CountingModel(GgufModel):
    """llama.cpp, asked how long a prompt is."""

    def tokens(self, messages, tools):
        text = self.render(messages, tools)
        answer = httpx2.post(f"{self._server.listening_address}/tokenize", json={"content": text})
        return len(answer.json()["tokens"])


def as_ollama_has(tool):
    """A tool after it has passed through Ollama's own structures."""
    function = tool["function"]
    kept = {
        key: function["parameters"][key] for key in OF_PARAMETERS if key in function["parameters"]
    }
    kept["properties"] = {
        name: _property(value) for name, value in (kept.pop("properties", None) or {}).items()
    }
    for key in ("items", "$defs"):
        if key in kept:
            kept[key] = _by_alphabet(kept[key])
    shown = {"name": function["name"], "description": function.get("description", "")}
    return {"type": tool["type"], "function": {**shown, "parameters": kept}}


def _property(value):
    kept = {key: value[key] for key in OF_PROPERTY if key in value}
    if "properties" in kept:
        kept["properties"] = {n: _property(v) for n, v in kept["properties"].items()}
    if "anyOf" in kept:
        kept["anyOf"] = [_property(v) for v in kept["anyOf"]]
    if "items" in kept:
        kept["items"] = _by_alphabet(kept["items"])
    return kept


def _by_alphabet(value):
    """A Go map, written as JSON."""
    return json.loads(json.dumps(value, sort_keys=True))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _body(self):
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length)

    def _json(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status, text):
        self._json(status, {"error": text})

    def do_HEAD(self):
        self.ollama.asked.append(("HEAD", self.path))
        digest = self.path.removeprefix("/api/blobs/")
        if not DIGEST.fullmatch(digest):
            return self._error(400, "invalid digest format")
        found = (self.ollama.blobs / digest.removeprefix("sha256:")).is_file()
        return self._json(200 if found else 404, {})

    def do_GET(self):
        self.ollama.asked.append(("GET", self.path))
        if self.ollama.take_fault("busy"):
            return self._error(503, "server busy, please try again")
        if self.path == "/api/version":
            return self._json(200, {"version": self.ollama.version})
        if self.path == "/api/tags":
            models = [{"name": made["name"]} for made in self.ollama.models.values()]
            return self._json(200, {"models": models})
        return self._error(404, "not found")

    def do_DELETE(self):
        self.ollama.asked.append(("DELETE", self.path))
        name = _full(json.loads(self._body())["model"])
        if self.ollama.models.pop(name, None) is None:
            return self._error(404, f"model '{name}' not found")
        return self._json(200, {})

    def do_POST(self):
        self.ollama.asked.append(("POST", self.path))
        if self.path.startswith("/api/blobs/"):
            return self._blob(self.path.removeprefix("/api/blobs/"))
        try:
            request = json.loads(self._body())
        except ValueError:
            return self._error(400, "invalid JSON")
        if self.path == "/api/create":
            return self._create(request)
        name = _full(request.get("model", ""))
        if name not in self.ollama.models:
            return self._error(404, f"model '{request.get('model')}' not found")
        if self.path == "/api/show":
            made = self.ollama.models[name]
            return self._json(
                200,
                {
                    "capabilities": made["capabilities"],
                    "parameters": made["parameters"],
                    "model_info": made["model_info"],
                    "license": made.get("license", ""),
                },
            )
        if self.path == "/api/generate":
            return self._generate(name, request)
        if self.path == "/api/chat":
            return self._chat(name, request)
        return self._error(404, "not found")

    def _blob(self, digest):
        if not DIGEST.fullmatch(digest):
            return self._error(400, "invalid digest format")
        if self.ollama.take_fault("cut upload"):
            self.rfile.read(10)
            return self._hang_up()
        if self.ollama.take_fault("slow"):
            time.sleep(2)
        if self.ollama.take_fault("full"):
            self._body()
            return self._error(500, "write blob: no space left on device")
        content = self._body()
        if hashlib.sha256(content).hexdigest() != digest.removeprefix("sha256:"):
            return self._error(400, "digest mismatch")
        (self.ollama.blobs / digest.removeprefix("sha256:")).write_bytes(content)
        return self._json(201, {})

    def _create(self, request):
        name = request.get("model", "")
        if not NAME.fullmatch(name):
            return self._error(400, "invalid model name")
        known = {"model", "files", "system", "parameters", "stream", "template", "license"}
        known |= {"from", "adapters"}
        assert set(request) <= known, f"unknown fields {set(request) - known}"
        for key, value in (request.get("parameters") or {}).items():
            if key not in PARAMETERS:
                return self._error(400, f"unknown parameter '{key}'")
            wanted = PARAMETERS[key]
            if not isinstance(value, int | float if wanted is float else wanted):
                return self._error(400, f"invalid {key} value")
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._line({"status": "parsing GGUF"})
        if self.ollama.take_fault("cut create"):
            return self._hang_up()
        problem = self._make(name, request)
        if problem:
            self._line({"error": problem})
        else:
            for status in ("creating new layer", "writing manifest", "success"):
                self._line({"status": status})
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _make(self, name, request):
        base = None
        if request.get("from"):
            base = self.ollama.models.get(_full(request["from"]))
            if base is None:
                return "pull model manifest: file does not exist"
        files = request.get("adapters" if base else "files") or {}
        if len(files) != 1:
            return "only one adapter" if base else "neither 'from' or 'files' was specified"
        ((path, digest),) = files.items()
        if Path(path).is_absolute() or ".." in path:
            return "file path must be relative"
        blob = self.ollama.blob(digest)
        if not blob.is_file():
            return f"blob {digest} not found"
        try:
            about = read_gguf(blob)
        except ValueError as error:
            return str(error)
        if self.ollama.take_fault("error line"):
            return "llama runner process has terminated"
        if (about.get("general.type") == "adapter") != bool(base):
            return "no base model was found" if not base else "not an adapter"
        made = {
            "name": name if ":" in name else f"{name}:latest",
            "digest": digest,
            "system": request.get("system") or "",
            "parameters": request.get("parameters") or {},
            "license": request.get("license") or "",
            "model_info": {k: v for k, v in about.items() if not k.startswith("tokenizer.")},
        }
        if base:
            kept = {name: base[name] for name in ("digest", "capabilities", "model_info")}
            made |= {**kept, "adapter": digest}
        else:
            jinja = about.get("tokenizer.chat_template", "")
            can_call = ".Tools" in (request.get("template") or "") or "tool" in jinja
            thinking = ["thinking"] if self.ollama.thinks else []
            made["capabilities"] = ["completion", *(["tools"] if can_call else []), *thinking]
        self.ollama.models[_full(name)] = made
        return None

    def _generate(self, name, request):
        if request.get("keep_alive") == 0 and "prompt" not in request:
            self.ollama.unloaded.append(name)
            return self._json(200, {"model": request["model"], "done": True})
        assert request["raw"] is True
        assert request["stream"] is False
        assert 0 <= request["top_logprobs"] <= 20
        answer = self.ollama.complete(name, request)
        token = answer["choices"][0]["logprobs"]["content"][0]
        listed = [
            {"token": one["token"], "logprob": one["logprob"]} for one in token["top_logprobs"]
        ]
        ended = answer["choices"][0]["finish_reason"] == "stop"
        said = {"token": token["token"], "logprob": token["logprob"], "top_logprobs": listed}
        return self._json(
            200,
            {
                "model": request["model"],
                "response": token["token"],
                "done": True,
                "logprobs": [] if ended else [said],
                "prompt_eval_count": answer["usage"]["prompt_tokens"],
            },
        )

    def _chat(self, name, request):
        if request.get("tools") and "tools" not in self.ollama.models[name]["capabilities"]:
            return self._error(400, f"{request['model']} does not support tools")
        assert request.get("stream") is False
        if request.get("_debug_render_only"):
            text = self.ollama.answer(name, request)
            return self._json(
                200, {"model": request["model"], "_debug_info": {"rendered_template": text}}
            )
        self.ollama.thought.append(request.get("think"))
        answer = self.ollama.answer(name, request)
        message = {"role": "assistant", "content": answer.message.get("content") or ""}
        if answer.message.get("tool_calls"):
            message["tool_calls"] = [
                {"function": call["function"]} for call in answer.message["tool_calls"]
            ]
        return self._json(
            200,
            {
                "model": request["model"],
                "message": message,
                "done": True,
                "done_reason": "length" if answer.cut_off else "stop",
                "prompt_eval_count": answer.prompt_tokens,
            },
        )

    def _hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _line(self, content):
        data = json.dumps(content).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def read_gguf(path):
    """The metadata of a GGUF file; arrays are left out."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("invalid file magic")
        version, _, entries = struct.unpack("<IQQ", file.read(20))
        if version not in (2, 3):
            raise ValueError("unsupported GGUF version")

        def text():
            return file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8", "replace")

        def value(kind):
            if kind == 8:
                return text()
            if kind == 9:
                inner, count = struct.unpack("<IQ", file.read(12))
                for _ in range(count):
                    value(inner)
                return None
            code = "BbHhIif?__QqdX"[kind]
            return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]

        found = {}
        for _ in range(entries):
            key = text()
            found[key] = value(struct.unpack("<I", file.read(4))[0])
        return found


def _full(name):
    return (name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest").lower()
