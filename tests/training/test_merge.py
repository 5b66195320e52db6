"""Merges of every kind of base and adapter, against base and adapter together."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from dressage.spec.status import Reason
from tests.conftest import ROOT, TINY_MODEL
from tests.training.adapters import make_adapter
from worker.training.export.merge import merge
from worker.training.process.failures import RunFailure

PROMPTS = ["What is 3 + 4?", "hello"]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model, tokenizer):
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits for text in PROMPTS]


def gap(one, other, tokenizer):
    pairs = zip(logits(one, tokenizer), logits(other, tokenizer), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def make_base(folder, *, dtype=torch.float32, shard="1MB", **changes):
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(TINY_MODEL)
    for name, value in changes.items():
        setattr(config, name, value)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size=shard)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder


@pytest.fixture
def merged(tmp_path):
    """`merged(...)`: merge an adapter; the report, and its model against base and adapter."""

    def go(base=TINY_MODEL, *, in_4bit=False, **adapter):
        expected = make_adapter(tmp_path / "adapter", base, **adapter)
        out = tmp_path / "merged"
        report = merge(tmp_path / "adapter", str(base), out, PROMPTS, trained_in_4bit=in_4bit)
        found = load(out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        return report, found, gap(found, expected, tokenizer)

    return go


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merge_computes_what_base_and_adapter_do_within_the_types_precision(
    merged, tmp_path, dtype
):
    report, _, seen = merged(make_base(tmp_path / "base", dtype=dtype))
    assert f"torch.{report.dtype}" == str(dtype)
    assert seen == pytest.approx(report.stored_gap, abs=1e-5)
    assert report.stored_gap <= report.stored_tolerance
    assert report.merge_gap <= 1e-4
    assert report.adapter_effect > 1
    assert (report.streamed, report.untied, report.trained_in_4bit) == (True, (), False)


def test_bases_in_shards_with_untied_and_padded_vocabularies(merged, tmp_path):
    base = make_base(tmp_path / "base", tie_word_embeddings=False, vocab_size=1152)
    assert len([*base.glob("*.safetensors")]) > 3
    report, model, seen = merged(base)
    assert (report.streamed, model.config.vocab_size) == (True, 1152)
    assert model.config.tie_word_embeddings is False
    assert seen < 1e-3


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "options", "streamed"),
    [
        (LlamaConfig, {}, True),
        (MistralConfig, {}, True),
        (Qwen2Config, {}, True),
        (Phi3Config, {"pad_token_id": 0}, True),
        (Gemma2Config, {"head_dim": 16}, True),
        (Gemma3TextConfig, {"head_dim": 16}, True),
        (Qwen3MoeConfig, EXPERTS, False),  # stored by expert, computed in one
    ],
)
def test_every_family(merged, tmp_path, family, options, streamed):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    torch.manual_seed(1)
    config = family(vocab_size=len(tokenizer), **SHAPE, **options)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "base")
    report, _, seen = merged(tmp_path / "base")
    assert report.streamed is streamed
    assert report.merge_gap < 1e-5
    assert seen == pytest.approx(report.stored_gap, abs=1e-5)
    assert report.stored_gap < report.adapter_effect / 20


def test_a_merge_writes_shards_too(tmp_path, monkeypatch):
    monkeypatch.setattr("worker.training.export.weights.SHARD_BYTES", 2_000_000)
    make_adapter(tmp_path / "adapter", TINY_MODEL)
    out = tmp_path / "merged"
    merge(tmp_path / "adapter", str(TINY_MODEL), out, PROMPTS, trained_in_4bit=False)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {path.name for path in out.glob("*.safetensors")}
    assert len(files) > 1
    assert (
        index["metadata"]["total_size"]
        == sum(t.numel() * 2 for t in load(out).state_dict().values() if t is not None)
        - 2 * load(out).lm_head.weight.numel()
    )


def test_added_tokens_take_their_embeddings_along(merged):
    report, model, seen = merged(tokens=["<new>", "<newer>"])
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert model.config.vocab_size == len(tokenizer) + 2
    assert report.streamed
    assert seen < 0.1


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("embeddings", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("output layer", {"target_modules": ["q_proj", "lm_head"]}),
        ("DoRA", {"use_dora": True}),
        ("whole layer", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_adapters_that_change_more_than_linear_layers_are_merged_in_memory(merged, kind, config):
    report, model, _ = merged(**config)
    assert report.streamed is False
    assert report.stored_gap <= report.stored_tolerance  # against base and adapter, inside
    changes_output = kind in ("embeddings", "output layer")
    assert report.untied == (("lm_head.weight",) if changes_output else ())
    assert model.config.tie_word_embeddings is not changes_output


def test_rank_stabilised_adapters_are_scaled_as_they_were_trained(merged):
    report, _, seen = merged(use_rslora=True)
    assert (report.streamed, seen < 0.1) == (True, True)


def test_a_merge_of_a_4_bit_job_says_that_its_base_was_another(merged):
    report, _, _ = merged(in_4bit=True)
    assert report.trained_in_4bit is True


def test_an_adapter_that_changes_nothing_is_a_failure(merged):
    with pytest.raises(RunFailure, match="the adapter changes nothing") as caught:
        merged(std=0.0)
    assert caught.value.reason is Reason.CONVERSION_FAILED


def test_an_adapter_that_the_bases_type_rounds_away_is_a_failure(merged, tmp_path):
    base = make_base(tmp_path / "base", dtype=torch.bfloat16)
    with pytest.raises(RunFailure, match=r"changes less than torch\.bfloat16"):
        merged(base, std=1e-6)


def test_several_adapters_are_refused_by_name(tmp_path):
    make_adapter(tmp_path / "adapter", TINY_MODEL)
    shutil.copytree(tmp_path / "adapter", tmp_path / "other")
    shutil.move(tmp_path / "other", tmp_path / "adapter" / "other")
    with pytest.raises(RunFailure, match="there are several: default, other"):
        merge(tmp_path / "adapter", str(TINY_MODEL), tmp_path / "m", PROMPTS, trained_in_4bit=False)


def test_a_base_that_is_stored_quantized_is_refused(tmp_path):
    make_adapter(tmp_path / "adapter", TINY_MODEL)
    base = tmp_path / "base"
    shutil.copytree(TINY_MODEL, base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunFailure, match="stored quantized"):
        merge(tmp_path / "adapter", str(base), tmp_path / "m", PROMPTS, trained_in_4bit=False)


def test_a_wrong_merge_is_caught(tmp_path, monkeypatch):
    """As if PEFT had scaled the adapter wrongly."""
    make_adapter(tmp_path / "adapter", make_base(tmp_path / "base"))
    from worker.training.export.merge_parts import MergeParts

    right = MergeParts.merged

    def wrong(self, name):
        return self.original(name) + 0.9 * (right(self, name) - self.original(name))

    monkeypatch.setattr(MergeParts, "merged", wrong)
    with pytest.raises(RunFailure, match=r"differ by .* from base and adapter together"):
        merge(
            tmp_path / "adapter",
            str(tmp_path / "base"),
            tmp_path / "m",
            PROMPTS,
            trained_in_4bit=False,
        )


MEASURE = """
import resource, sys, torch
from pathlib import Path
from worker.training.export.merge import merge
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.ones(256, 256) @ torch.ones(256, 256)
before = peak()
merge(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), ["hello"], trained_in_4bit=False)
print(peak() - before)
"""


def test_memory_is_that_of_a_shard_not_of_the_model(tmp_path):
    """A base of 536 MB in bfloat16; in float32, as a merge in memory needs it, 1.1 GB."""
    base = make_base(
        tmp_path / "base",
        dtype=torch.bfloat16,
        shard="100MB",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=20,
        layer_types=["full_attention"] * 20,
    )
    make_adapter(tmp_path / "adapter", base)
    program = MEASURE.replace(
        "from pathlib",
        "import worker.training.export.weights as w\nw.SHARD_BYTES = 100_000_000\nfrom pathlib",
        1,
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "adapter", base, tmp_path / "merged"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert size > 500_000_000
    assert int(done.stdout) < 0.7 * size
