"""What an export costs beside llama.cpp's converter alone: time and peak memory, in the same run.

    python bench/export.py [--quick]

A model of SmolLM2's size with random weights becomes a q8_0 GGUF: by the converter, and by the
process that an export worker starts, which also unpacks, checks, runs the file and says where it is
from. `time_ratio` compares the conversion; what the other steps take is printed beside it.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dressage.authoring import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.job import JobSpec
from worker.training.export.gguf import ENTRY, convert
from worker.training.export.programs import converter_path
from worker.training.export.spec import ExportRunSpec
from worker.training.run_dir import INPUT, SPEC, SUITE, RunDirectory

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TINY = ROOT / "examples" / "tiny_agent" / "model"


def make_model(folder, layers):
    """Big enough that conversion takes seconds; the tokenizer is the tiny agent's."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measured(work):
    """Seconds, and the peak memory of the heaviest child, in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        began = time.monotonic()
        work()
        peak = max(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 0)
        os.write(write, json.dumps([time.monotonic() - began, peak * 1024]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def alone(model, out):
    command = [sys.executable, str(ENTRY), str(converter_path()), "{}", str(model)]
    subprocess.run(
        [*command, "--outfile", str(out), "--outtype", "q8_0"], check=True, capture_output=True
    )


def make_export(folder):
    """What an export worker lays out: specification, suite, trained model."""
    job = json.loads((ARITHMETIC / "job.json").read_text())
    job |= {"exports": []}
    job["agent"]["model"] = str(folder / "model")
    run = RunDirectory(folder / "export")
    shutil.copytree(folder / "model", folder / "final" / "model")
    packed = run.pack(folder / "final" / "model", ArtifactKind.MODEL)
    (run.artifacts / packed.name).rename(run.path / INPUT)
    (run.path / SUITE).write_bytes(Suite.from_path(ARITHMETIC).to_archive())
    spec = ExportRunSpec(
        export={"type": "gguf", "quantization": "q8_0"},
        job=JobSpec.model_validate(job),
        job_id="job_1",
        trained=ArtifactKind.MODEL,
    )
    (run.path / SPEC).write_text(spec.model_dump_json())
    return run.path


def whole(path):
    subprocess.run(
        [sys.executable, "-m", "worker.training.export", str(path)], check=True, capture_output=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dressage-export-"))
    try:
        size = make_model(folder / "model", 8 if options.quick else 24)
        rounds = 3 if options.quick else 5
        ours, theirs = [], []
        for number in range(rounds):
            theirs.append(measured(lambda n=number: alone(folder / "model", folder / f"a{n}.gguf")))
            ours.append(
                measured(
                    lambda n=number: convert(
                        folder / "model", folder / f"b{n}.gguf", "q8_0", {"job": "job_1"}
                    )
                )
            )
            for made in folder.glob("*.gguf"):
                made.unlink()
        seconds, peak = measured(lambda: whole(make_export(folder)))
    finally:
        shutil.rmtree(folder)
    times = [median(run[0] for run in runs) for runs in (ours, theirs)]
    peaks = [median(run[1] for run in runs) for runs in (ours, theirs)]
    table = Table("", "ours", "converter alone", "ratio")
    table.add_row("seconds", *(f"{t:.2f}" for t in times), f"{times[0] / times[1]:.3f}")
    table.add_row("peak MB", *(f"{p / 1e6:.0f}" for p in peaks), f"{peaks[0] / peaks[1]:.3f}")
    Console().print(table)
    print(
        f"the whole export, with unpacking, loading and three cases answered: {seconds:.1f} s, "
        f"peak {peak / 1e6:.0f} MB"
    )
    print(
        json.dumps(
            {
                "model_bytes": size,
                "rounds": rounds,
                "time_ratio": times[0] / times[1],
                "memory_ratio": peaks[0] / peaks[1],
                "seconds": times[0],
                "peak_bytes": peaks[0],
                "whole_export_seconds": seconds,
                "whole_export_peak_bytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
