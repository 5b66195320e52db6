"""`dressage doctor`: what is here and what is missing, with the fix."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import httpx2
import typer
from rich.markup import escape
from rich.table import Table

from dressage.cli.console import AsJson, Url, console, print_json
from dressage.client.client import DEFAULT_URL

app = typer.Typer()
SECONDS = 5.0
ROOM_GB = 20.0
HUB, OLLAMA = "https://huggingface.co", "http://127.0.0.1:11434"

State = Literal["ok", "missing", "wrong"]
SHOWN = {"ok": "[green]ok[/green]", "missing": "–", "wrong": "[red]wrong[/red]"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do. `missing` need not be there."""

    what: str
    state: State
    told: str
    fix: str = ""


@app.command()
def doctor(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Look at this machine and the service: what is here, what is missing, and the fix.

    Fails when something is wrong, not when it is absent.
    """
    found = [finding for look in LOOKS for finding in look(url)]
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        table = Table("what", "", "found", "what to do", show_header=False, box=None)
        for one in found:
            table.add_row(one.what, SHOWN[one.state], escape(one.told), escape(one.fix))
        console.print(table)
    if any(one.state == "wrong" for one in found):
        raise typer.Exit(1)


def _python(_url: str) -> Iterator[Finding]:
    fine = sys.version_info >= (3, 11)
    told = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", "ok" if fine else "wrong", told, "" if fine else "use 3.11 or later")


def _disk(_url: str) -> Iterator[Finding]:
    free = shutil.disk_usage(os.getcwd()).free / 1e9
    fine = free >= ROOM_GB
    fix = "" if fine else f"models, checkpoints and files want {ROOM_GB:g} GB or more"
    yield Finding("disk", "ok" if fine else "wrong", f"{free:.0f} GB free here", fix)


def _gpu(_url: str) -> Iterator[Finding]:
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        yield Finding("GPU", "missing", "no NVIDIA driver", 'jobs with "gpus": 0 run on the CPU')
        return
    except subprocess.TimeoutExpired:
        yield Finding("GPU", "wrong", "nvidia-smi does not answer", "look at the driver: dmesg")
        return
    if done.returncode:
        yield Finding("GPU", "wrong", done.stdout.strip()[:200], "look at the driver: dmesg")
        return
    for line in done.stdout.splitlines():
        yield Finding("GPU", "ok", line)


def _packages(_url: str) -> Iterator[Finding]:
    for package, fix in (
        ("torch", "only workers need it: scripts/setup"),
        ("trl", "only workers need it: scripts/setup"),
        ("vllm", "training.vllm needs it on a GPU worker: pip install vllm==0.22.0"),
        ("bitsandbytes", "training.load_in_4bit needs it on a GPU worker"),
    ):
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "missing", "not installed", fix)


def _quantize(_url: str) -> Iterator[Finding]:
    given = os.environ.get("LLAMA_CPP_PATH", "")
    own = [given, f"{given}/build/bin"] if given else []
    places = os.pathsep.join([*own, f"{sys.prefix}/bin", os.environ.get("PATH", "")])
    there = shutil.which("llama-quantize", path=places)
    fix = "" if there else "K-quants need it: scripts/build-llama-quantize"
    yield Finding("llama-quantize", "ok" if there else "missing", there or "not found", fix)


def _servers(url: str) -> Iterator[Finding]:
    yield from _service(url)
    yield _answers("Ollama", f"{OLLAMA}/api/version", "exports to Ollama need it: ollama serve")
    yield _answers("model hub", HUB, "hub models need it; model folders do not")


def _service(url: str) -> Iterator[Finding]:
    try:
        ready = httpx2.get(f"{url.rstrip('/')}/readyz", timeout=SECONDS).json()
        checks = dict(ready["checks"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        fix = "start it: dressage up; or name it: DRESSAGE_URL"
        yield Finding("service", "missing", f"nothing answers at {url}", fix)
        return
    for part, told in checks.items():
        state: State = "ok" if told == "ok" else "wrong"
        yield Finding(f"service: {part}", state, told)


def _answers(what: str, url: str, fix: str) -> Finding:
    try:
        status = httpx2.get(url, timeout=SECONDS).status_code
    except httpx2.HTTPError:
        return Finding(what, "missing", f"nothing answers at {url}", fix)
    return Finding(what, "ok", f"{url} answers {status}")


LOOKS: tuple[Callable[[str], Iterator[Finding]], ...] = (
    *(_python, _disk, _gpu, _packages, _quantize, _servers),
)
