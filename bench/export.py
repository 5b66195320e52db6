"""What an export costs: our conversion beside llama.cpp's converter, our merge beside PEFT's.

    python bench/export.py [--quick]

A model with random weights, and an adapter on all its linear layers. In the same run, alternating:
the merged model becomes a q8_0 GGUF by the converter alone, and by ours, which also checks the
disk, the template and what the converter wrote; the adapter is merged by PEFT in memory, and by
ours, which goes tensor by tensor and compares logits four times. Then the whole process that an
export worker starts: unpack, merge, compare, convert, run, answer.
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
import traceback
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF
from statistics import median

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dressage.authoring import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.job import JobSpec
from worker.training.export.gguf import ENTRY, convert
from worker.training.export.merge import merge
from worker.wire.export_spec import ExportRunSpec
from worker.wire.programs import converter_folder
from worker.wire.run_dir import INPUT, SPEC, SUITE, RunDirectory

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TINY = ROOT / "examples" / "tiny_agent" / "model"
PROMPTS = ["What is 3 + 4?", "What is 12 * 9?", "hello"]


def make_model(folder, layers):
    """Qwen3-0.6B's shapes; the tokenizer is the tiny agent's."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_adapter(folder, base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def measured(work, who=RUSAGE_CHILDREN):
    """Seconds, and the peak memory of the heaviest child, or of the process of its own itself."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            began = time.monotonic()
            work()
            spent = time.monotonic() - began
            peak = resource.getrusage(who).ru_maxrss * 1024
            os.write(write, json.dumps([spent, peak]).encode())
        except Exception:  # noqa: BLE001  whatever it is, it is shown and gives no figure
            traceback.print_exc()
        os._exit(0)  # nothing of the parent's is cleaned up twice
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def convert_alone(model, out):
    command = [sys.executable, str(ENTRY), str(converter_folder()), "{}", str(model)]
    subprocess.run(
        [*command, "--outfile", str(out), "--outtype", "q8_0"], check=True, capture_output=True
    )


def merge_in_memory(adapter, base, out):
    """As PEFT's documentation merges, in the type in which ours adds."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.bfloat16().save_pretrained(out)


def make_export(folder):
    """What an export worker lays out: specification, suite, adapter."""
    job = json.loads((ARITHMETIC / "job.json").read_text())
    job |= {"exports": []}
    job["agent"]["model"] = str(folder / "model")
    run = RunDirectory(folder / "export")
    packed = run.pack(folder / "adapter", ArtifactKind.ADAPTER)
    (run.artifacts / packed.name).rename(run.path / INPUT)
    (run.path / SUITE).write_bytes(Suite.from_path(ARITHMETIC).to_archive())
    spec = ExportRunSpec(
        export={"type": "gguf", "quantization": "q8_0"},
        job=JobSpec.model_validate(job),
        job_id="job_1",
        trained=ArtifactKind.ADAPTER,
    )
    (run.path / SPEC).write_text(spec.model_dump_json())
    return run.path


def whole(path):
    subprocess.run(
        [sys.executable, "-m", "worker.training.export", str(path)], check=True, capture_output=True
    )


def figures(runs):
    return median(run[0] for run in runs), median(run[1] for run in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dressage-export-"))
    model, adapter, merged = folder / "model", folder / "adapter", folder / "merged"
    runs = {"converter": [], "our conversion": [], "PEFT's merge": [], "our merge": []}
    try:

        def prepare():
            make_model(model, 8 if options.quick else 28)
            make_adapter(adapter, model)

        # Everything heavy in processes of its own, so that it counts for nobody else.
        measured(prepare)
        for number in range(2 if options.quick else 5):
            ours, theirs = folder / f"ours-{number}", folder / f"theirs-{number}"
            runs["PEFT's merge"].append(
                measured(lambda o=theirs: merge_in_memory(adapter, model, o), RUSAGE_SELF)
            )
            runs["our merge"].append(
                measured(
                    lambda o=ours: merge(adapter, str(model), o, PROMPTS, trained_in_4bit=False),
                    RUSAGE_SELF,
                )
            )
            shutil.rmtree(theirs)
            shutil.rmtree(merged, ignore_errors=True)
            ours.rename(merged)
            runs["converter"].append(
                measured(lambda n=number: convert_alone(merged, folder / f"a{n}.gguf"))
            )
            runs["our conversion"].append(
                measured(
                    lambda n=number: convert(merged, folder / f"b{n}.gguf", "q8_0", {"job": "1"})
                )
            )
            for made in folder.glob("*.gguf"):
                made.unlink()
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        export_seconds, export_peak = measured(lambda: whole(make_export(folder)))
    finally:
        shutil.rmtree(folder)
    found = {name: figures(one) for name, one in runs.items()}
    table = Table("", "seconds", "peak MB", "time ratio", "memory ratio")
    pairs = [("converter", "our conversion"), ("PEFT's merge", "our merge")]
    ratios = {}
    for baseline, ours in pairs:
        table.add_row(baseline, f"{found[baseline][0]:.2f}", f"{found[baseline][1] / 1e6:.0f}")
        ratios[ours] = [a / b for a, b in zip(found[ours], found[baseline], strict=True)]
        table.add_row(
            ours,
            f"{found[ours][0]:.2f}",
            f"{found[ours][1] / 1e6:.0f}",
            *(f"{ratio:.3f}" for ratio in ratios[ours]),
        )
    Console().print(table)
    print(
        f"the whole export of {size / 1e6:.0f} MB, with unpacking, the comparison of logits, "
        f"loading and three answers: {export_seconds:.1f} s, peak {export_peak / 1e6:.0f} MB"
    )
    print(
        json.dumps(
            {
                "model_bytes": size,
                "rounds": len(runs["converter"]),
                "time_ratio": ratios["our conversion"][0],
                "memory_ratio": ratios["our conversion"][1],
                "merge_time_ratio": ratios["our merge"][0],
                "merge_memory_ratio": ratios["our merge"][1],
                "merge_peak_bytes": found["our merge"][1],
                "whole_export_seconds": export_seconds,
                "whole_export_peak_bytes": export_peak,
            }
        )
    )


if __name__ == "__main__":
    main()
