"""From a trained model to what is served: real conversions, and a strict Ollama of our own."""

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dressage.authoring import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.spec.artifact import ArtifactKind
from dressage.spec.export import K_QUANTS
from dressage.spec.job import JobSpec
from dressage.spec.parity import ParityProblem
from dressage.spec.status import Reason
from dressage.spec.training import EvaluationSpec
from tests.conftest import TINY_MODEL
from tests.ollama_server import OllamaServer, read_gguf
from tests.training.adapters import make_adapter
from tests.training.conftest import events_of
from worker.training.evaluate import split
from worker.training.export import __main__ as export_main
from worker.training.export.__main__ import run_export
from worker.training.export.gguf import GgufModel, convert
from worker.training.export.merge import merge
from worker.training.export.ollama import Ollama
from worker.training.export.parity import ParityCheck
from worker.training.export.served import agent_template
from worker.training.process.failures import RunFailure
from worker.training.process.user_code import user_code
from worker.wire.export_spec import ExportRunSpec
from worker.wire.programs import quantize_path
from worker.wire.run_dir import INPUT, MANIFEST, SPEC, SUITE, RunDirectory

CASES = 6


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """An adapter that changes the model a little, as training does."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    make_adapter(folder, TINY_MODEL)
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Files that the converter has made of merged models, by what they were made with."""
    return tmp_path_factory.mktemp("converted"), {}


@pytest.fixture(autouse=True)
def conversion_once(monkeypatch, converted):
    """The same conversion is made once: most of these tests are about what comes after it."""
    folder, known = converted
    real = export_main.convert

    def convert(model, out, quantization, metadata):
        key = (hashed(model), quantization, json.dumps(metadata))
        if key not in known:
            real(model, out, quantization, metadata)
            known[key] = folder / f"{len(known)}.gguf"
            shutil.copy(out, known[key])
        shutil.copy(known[key], out)

    monkeypatch.setattr(export_main, "convert", convert)


def hashed(model):
    names = ("model.safetensors", "chat_template.jinja", "config.json", "tokenizer.json")
    return tuple(sha256_of(model / name) for name in names)


@pytest.fixture
def job(job_spec):
    return JobSpec.model_validate({**job_spec, "evaluation": {"holdout": 0.2}})


@pytest.fixture
def export(tmp_path, arithmetic, job, adapter):
    """`export({...})`: run one export of the adapter; the directory, and its manifest."""

    def go(spec, *, url=None, suite=arithmetic, **options):
        folder = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        run_spec = ExportRunSpec(
            **{
                "export": spec,
                "job": job,
                "job_id": "job_1",
                "trained": ArtifactKind.ADAPTER,
                "ollama_url": url,
                **options,
            }
        )
        (folder / SPEC).write_text(run_spec.model_dump_json())
        (folder / SUITE).write_bytes(suite.to_archive())
        run = RunDirectory(folder)
        packed = run.pack(adapter, ArtifactKind.ADAPTER)
        (run.artifacts / packed.name).rename(folder / INPUT)
        run_export(run)
        return run, json.loads((folder / MANIFEST).read_text())

    return go


@pytest.fixture
def check(arithmetic, job, adapter):
    """A parity check of the adapter on its base, over a few held-out cases."""
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    _, held_out = split(arithmetic.cases, EvaluationSpec(holdout=0.1))
    with user_code(arithmetic, network=False, size=2) as pool:
        assert isinstance(pool, WorkerPool)
        tools = job.agent.tool_schemas(pool.sandbox.tools, pool.sandbox.environments)
        template = agent_template(job.agent, tokenizer, tools)
        yield ParityCheck(job, model, template, pool, held_out[:CASES])


def served(path, **options):
    model = GgufModel(path, context_length=512)
    return lambda messages, tools: model.respond(messages, tools, max_tokens=60, **options)


@pytest.fixture(scope="session")
def merged(tmp_path_factory, adapter):
    folder = tmp_path_factory.mktemp("merged") / "merged"
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(folder)
    return folder


def test_a_gguf_serves_what_was_trained_and_says_where_it_is_from(export):
    run, manifest = export({"type": "gguf", "quantization": "f16", "parity_cases": CASES})
    merged, report = manifest["result"]["parity"]
    assert (merged["served"], merged["problems"], merged["same_answer"]) == ("merged", [], 1.0)
    assert merged["kl"] < 1e-3
    assert report["problems"] == []
    assert (report["cases"], report["same_prompt"], report["top_token"]) == (CASES, 1.0, 1.0)
    assert report["same_answer"] >= 0.8
    assert report["kl"] < report["kl_base"] / 10
    about = read_gguf(run.artifacts / "model-f16.gguf")
    assert about["dressage.job"] == "job_1"
    assert about["dressage.suite"] == "arithmetic"
    assert about["general.name"] == about["dressage.job_name"] != "Merged"
    assert about["dressage.base_model"] == "model"  # of a folder its name, not its place
    assert len(about["dressage.spec_sha256"]) == 64
    assert manifest["files"][0]["kind"] == "gguf"


def test_a_dropped_adapter_is_caught(check, base_gguf):
    model = GgufModel(base_gguf, context_length=512)
    report = check.report("base", served(base_gguf), model.next_token)
    assert ParityProblem.NEARER_TO_BASE in report.problems
    assert report.kl > report.kl_base


def test_a_broken_template_is_caught(check, merged, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(merged, broken)
    template = (broken / "chat_template.jinja").read_text()
    assert "tools" in template
    (broken / "chat_template.jinja").write_text("{%- set tools = [] %}" + template)
    path = tmp_path / "broken.gguf"
    convert(broken, path, "f16", {})
    report = check.report("broken", served(path))
    assert ParityProblem.PROMPT_DIFFERS in report.problems
    assert report.same_prompt == 0.0


def test_a_wrong_end_of_turn_is_caught(check, merged, tmp_path):
    path = tmp_path / "model.gguf"
    convert(merged, path, "f16", {})
    report = check.report("endless", served(path, ignore_eos=True))
    assert ParityProblem.RUNS_ON in report.problems
    assert report.cut_off == 1.0


@pytest.mark.skipif(quantize_path() is None, reason="scripts/build-llama-quantize was not run")
@pytest.mark.parametrize("quantization", ["q4_k_m", "q6_k"])
def test_k_quants_run_and_are_smaller(export, quantization):
    run, manifest = export({"type": "gguf", "quantization": quantization, "parity_cases": CASES})
    path = run.artifacts / f"model-{quantization}.gguf"
    assert path.stat().st_size < 2_300_000  # f16 has 5 MB
    assert [one["same_prompt"] for one in manifest["result"]["parity"]] == [1.0, 1.0]
    assert [*run.artifacts.iterdir()] == [path]


def test_k_quants_without_the_program_say_how_to_get_it(export, monkeypatch):
    monkeypatch.setattr("worker.training.export.gguf.quantize_path", lambda: None)
    with pytest.raises(RunFailure, match="scripts/build-llama-quantize") as caught:
        export({"type": "gguf", "quantization": K_QUANTS[0]})
    assert caught.value.reason is Reason.MISSING_DEPENDENCY


def test_a_full_disk_is_known_before_the_conversion(export, monkeypatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: shutil._ntuple_diskusage(total=1, used=1, free=1)
    )
    with pytest.raises(RunFailure, match="are free") as caught:
        export({"type": "gguf"})
    assert caught.value.reason is Reason.DISK_FULL


def test_an_adapter_as_gguf(export, adapter, tmp_path):
    run, manifest = export({"type": "gguf_adapter", "parity_cases": CASES})
    path = run.artifacts / "adapter-f16.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert path.stat().st_size < 500_000
    assert manifest["files"][0]["kind"] == "gguf_adapter"
    (report,) = manifest["result"]["parity"]
    assert (report["served"], report["problems"], report["same_prompt"]) == (
        *("adapter-f16", [], 1.0),
    )
    assert report["kl"] < report["kl_base"] / 2  # loaded on its base, it changes what it should
    assert str(TINY_MODEL).encode() not in path.read_bytes()  # no path of ours leaves the house


def test_an_adapter_that_the_converter_gets_wrong_is_refused(export, adapter):
    config = adapter / "adapter_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "use_rslora": True}))
    try:
        with pytest.raises(RunFailure, match="use_rslora"):
            export({"type": "gguf_adapter"})
    finally:
        config.write_text(before)


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def ollama(tmp_path):
    folder = tmp_path / "blobs"
    folder.mkdir()
    with OllamaServer(folder) as server:
        yield server


def ollama_spec(**changes):
    return {"type": "ollama", "name": "calc-agent", "parity_cases": 2, **changes}


def test_a_model_is_registered_and_answers_as_it_was_trained(export, ollama):
    run, manifest = export(ollama_spec(system_prompt=True, temperature=0.5), url=ollama.url)
    assert manifest["failure"] is None
    assert set(ollama.models) == {"calc-agent:latest"}
    made = ollama.models["calc-agent:latest"]
    assert made["capabilities"] == ["completion", "tools"]
    assert made["system"] == "Solve the exercise. Use the calculator."
    assert made["parameters"]["stop"] == ["<|im_end|>"]
    assert made["parameters"]["temperature"] == 0.5
    # All that the model holds; 4,096 of a larger one.
    assert made["parameters"]["num_ctx"] == 1024
    reports = manifest["result"]["parity"]
    assert [one["served"] for one in reports] == ["merged", "gguf-q8_0", "ollama:calc-agent"]
    assert [one["problems"] for one in reports] == [[], [], []]
    *_, report = reports
    assert report["same_prompt"] == 1.0
    assert report["distributions"] > 10
    assert report["kl"] < report["kl_base"] / 2
    assert manifest["result"]["ollama"]["name"] == "calc-agent"
    logs = [event["message"] for event in events_of(run, "log")]
    assert "Ollama: success" in logs


def test_the_context_has_room_for_what_environments_add(export, ollama):
    """500 tokens, as an environment has made of a short question, and 60 to answer: 768."""
    _, manifest = export(ollama_spec(parity_cases=0), url=ollama.url, longest_prompt=500)
    assert manifest["failure"] is None
    assert ollama.models["calc-agent:latest"]["parameters"]["num_ctx"] == 1024


def test_a_model_that_can_think_is_asked_as_it_was_trained(export, ollama, job):
    _, manifest = export(ollama_spec(), url=ollama.url)
    assert {*ollama.thought} == {None}  # it cannot
    ollama.thinks = True
    quiet = job.model_copy(update={"agent": job.agent.model_copy(update={"thinking": False})})
    _, manifest = export(ollama_spec(overwrite=True), url=ollama.url, job=quiet)
    assert manifest["failure"] is None
    assert {*ollama.thought} == {None, False}
    assert manifest["result"]["ollama"]["think"] is False


def test_a_name_that_is_taken_is_refused_before_anything_is_converted(export, ollama):
    other = {"name": "Calc-Agent:latest", "digest": "old", "capabilities": [], "model_info": {}}
    ollama.models["calc-agent:latest"] = {**other, "parameters": {}}
    with pytest.raises(RunFailure, match="choose another name, or set overwrite") as caught:
        export(ollama_spec(), url=ollama.url)
    assert caught.value.reason is Reason.OLLAMA_REFUSED
    assert ollama.models["calc-agent:latest"]["digest"] == "old"
    export(ollama_spec(overwrite=True, parity_cases=0), url=ollama.url)
    assert ollama.models["calc-agent:latest"]["digest"] != "old"
    assert len(ollama.models) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cut upload", "ollama_unavailable"),
        ("full", "ollama_unavailable"),
        ("slow", "ollama_unavailable"),
        ("cut create", "ollama_unavailable"),
        ("error line", "ollama_refused"),
    ],
)
def test_a_server_that_fails_leaves_no_half_model_and_the_file_is_kept(
    export, ollama, fault, reason, monkeypatch
):
    if fault == "slow":
        monkeypatch.setattr("worker.training.export.ollama.SILENT_SECONDS", 0.5)
    ollama.fault = fault
    _, manifest = export(ollama_spec(parity_cases=0), url=ollama.url)
    assert manifest["failure"]["reason"] == reason
    assert ollama.models == {}
    assert [file["name"] for file in manifest["files"]] == ["model-q8_0.gguf"]


def test_servers_that_cannot_do_it_are_refused_before_the_conversion(export, tmp_path, ollama):
    ollama.version = "0.12.3"
    with pytest.raises(RunFailure, match=r"0\.30 or newer") as caught:
        export(ollama_spec(), url=ollama.url)
    assert caught.value.reason is Reason.OLLAMA_REFUSED
    ollama.version, ollama.fault = "0.30.1", "busy"
    with pytest.raises(RunFailure, match="server busy") as caught:
        export(ollama_spec(), url=ollama.url)
    assert caught.value.reason is Reason.OLLAMA_UNAVAILABLE
    with pytest.raises(RunFailure, match="does not answer") as caught:
        export(ollama_spec(), url="http://127.0.0.1:1")
    assert caught.value.reason is Reason.OLLAMA_UNAVAILABLE


def test_what_is_not_what_was_trained_is_not_registered_unless_it_may_be(
    export, ollama, monkeypatch
):
    """The server's own prompt is longer: as if it knew another template."""
    answer = OllamaServer.answer

    def other(self, model, request):
        longer = [{"role": "system", "content": "Be brief and exact."}, *request["messages"][1:]]
        return answer(self, model, {**request, "messages": longer})

    monkeypatch.setattr(OllamaServer, "answer", other)
    _, manifest = export(ollama_spec(), url=ollama.url)
    assert manifest["failure"]["reason"] == "parity_failed"
    assert "prompt_differs" in manifest["failure"]["message"]
    assert ollama.models == {}
    run, manifest = export(ollama_spec(on_problem="flag"), url=ollama.url)
    assert manifest["failure"] is None
    assert set(ollama.models) == {"calc-agent:latest"}
    assert any(event.get("code") == "parity" for event in events_of(run, "warning"))


def test_an_attempt_after_one_that_registered_and_was_lost_registers_the_same(export, ollama):
    spec = ollama_spec(parity_cases=0, quantization="f16")
    export(spec, url=ollama.url)
    _, manifest = export(spec, url=ollama.url, attempt=2)
    assert manifest["failure"] is None
    assert set(ollama.models) == {"calc-agent:latest"}
    ollama.models["calc-agent:latest"]["model_info"]["dressage.job"] = "job_2"  # another's by now
    _, manifest = export(spec, url=ollama.url, attempt=2)
    assert manifest["failure"]["reason"] == "ollama_refused"
    assert "choose another name" in manifest["failure"]["message"]


def test_a_model_of_the_export_itself_may_be_made_with_other_options(export, ollama):
    _, first = export(ollama_spec(parity_cases=0), url=ollama.url)
    digest = first["result"]["ollama"]["digest"]
    changed = ollama_spec(parity_cases=0, system_prompt=True, quantization="f16")
    _, manifest = export(changed, url=ollama.url)
    assert manifest["failure"] is None
    assert ollama.models["calc-agent:latest"]["system"].startswith("Solve the exercise.")
    assert ollama.models["calc-agent:latest"]["digest"] != digest


def test_digests_are_those_of_the_files(ollama, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + b"x" * 100_000)
    server, said = Ollama(ollama.url), []
    digest = server.upload(file, sha256_of(file), said.append)
    assert (ollama.blobs / digest.removeprefix("sha256:")).read_bytes() == file.read_bytes()
    asked = len(ollama.asked)
    assert server.upload(file, sha256_of(file), said.append) == digest
    assert ollama.asked[asked:] == [("HEAD", f"/api/blobs/{digest}")]
    assert said == ["uploaded 100 % of 0.1 MB", "has x.gguf already"]


def test_a_disk_that_becomes_full_during_the_conversion_is_no_fault_of_the_model(merged, tmp_path):
    with pytest.raises(RunFailure) as caught:
        convert(merged, Path("/dev/full"), "f16", {})
    assert caught.value.reason is Reason.DISK_FULL


@pytest.fixture
def with_base(ollama, base_gguf):
    """The job's base model, on the server under `tiny:base`."""
    path, server = base_gguf, Ollama(ollama.url)
    server.create(
        {"model": "tiny:base", "files": {path.name: server.upload(path, sha256_of(path), print)}},
        lambda _: None,
    )
    return ollama


def test_an_adapter_is_registered_on_a_base_that_the_server_has(export, with_base):
    _, manifest = export(ollama_spec(base="tiny:base"), url=with_base.url)
    assert manifest["failure"] is None
    assert [file["name"] for file in manifest["files"]] == ["adapter-f16.gguf"]
    assert set(with_base.models) == {"tiny:base", "calc-agent:latest"}
    made = with_base.models["calc-agent:latest"]
    assert made["digest"] == with_base.models["tiny:base"]["digest"]
    assert made["adapter"] == manifest["result"]["ollama"]["digest"]
    (report,) = manifest["result"]["parity"]
    assert (report["problems"], report["same_prompt"]) == ([], 1.0)
    assert report["kl"] < report["kl_base"] / 2


def test_a_base_that_ignores_the_adapter_is_caught(export, with_base, monkeypatch):
    load = OllamaServer._load
    monkeypatch.setattr(
        OllamaServer, "_load", lambda self, made: load(self, {**made, "adapter": None})
    )
    _, manifest = export(ollama_spec(base="tiny:base"), url=with_base.url)
    assert manifest["failure"]["reason"] == "parity_failed"
    assert "nearer_to_base" in manifest["failure"]["message"]
    assert set(with_base.models) == {"tiny:base"}


def test_a_base_that_is_not_there_or_not_the_jobs_is_refused(export, with_base):
    with pytest.raises(RunFailure, match="no model 'tiny:other'; pull it there"):
        export(ollama_spec(base="tiny:other"), url=with_base.url)
    with_base.models["tiny:base"]["model_info"]["qwen3.block_count"] = 28
    with pytest.raises(RunFailure, match="it has 28 layers of width 256, the base 4 of 256"):
        export(ollama_spec(base="tiny:base"), url=with_base.url)


def test_without_a_report_the_server_is_still_asked_once(export, ollama):
    _, manifest = export(ollama_spec(parity_cases=0), url=ollama.url)
    assert manifest["failure"] is None
    assert ollama.asked.count(("POST", "/api/chat")) == 1


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        ("pre-tokenizer", "recognises published tokenizers only, not retrained ones"),
        ("more tokens", "the tokenizer has more tokens than the model has embeddings"),
        ("architecture", "llama.cpp does not support the architecture FooForCausalLM"),
        ("weight", "has not in llama.cpp: model.layers.0.gadget.weight"),
    ],
)
def test_what_the_converter_refuses_becomes_a_sentence(merged, tmp_path, breakage, sentence):
    broken = tmp_path / "broken"
    shutil.copytree(merged, broken)
    if breakage == "pre-tokenizer":
        tokenizer = json.loads((broken / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x+"
        (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif breakage == "more tokens":
        tokenizer = AutoTokenizer.from_pretrained(broken)
        tokenizer.add_tokens([f"<extra {number}>" for number in range(200)])
        tokenizer.save_pretrained(broken)
    elif breakage == "architecture":
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(
            json.dumps({**config, "architectures": ["FooForCausalLM"]})
        )
    else:
        tensors = load_file(broken / "model.safetensors")
        tensors["model.layers.0.gadget.weight"] = torch.zeros(4)
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=re.escape(sentence)) as caught:
        convert(broken, tmp_path / "x.gguf", "f16", {})
    assert caught.value.reason is Reason.CONVERSION_FAILED


def test_an_export_of_the_example_passes_its_own_parity(export, ollama, arithmetic):
    """As the README does it: no `on_problem`, every turn's prompt the trained one as text."""
    _, manifest = export(ollama_spec(parity_cases=CASES), url=ollama.url)
    assert manifest["failure"] is None
    *_, report = manifest["result"]["parity"]
    assert report["served"] == "ollama:calc-agent"
    assert (report["problems"], report["notes"], report["first_difference"]) == ([], [], None)
    assert report["same_prompt"] == 1.0
    assert "_debug_render_only" not in str(manifest["result"])


def test_it_is_served_with_the_sampling_it_was_proved_with(export, ollama, job):
    proved = job.model_copy(
        update={"evaluation": job.evaluation.model_copy(update={"temperature": 0.3})}
    )
    _, manifest = export(ollama_spec(parity_cases=0), url=ollama.url, job=proved)
    parameters = ollama.models["calc-agent:latest"]["parameters"]
    assert parameters == manifest["result"]["ollama"]["parameters"]
    assert {name: parameters[name] for name in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.3,
        "top_p": 1.0,
        "top_k": 0,
    }
    assert (parameters["num_predict"], parameters["repeat_penalty"]) == (60, 1.0)


def test_a_context_beyond_what_the_model_holds_is_said(export, ollama):
    run, _ = export(ollama_spec(parity_cases=0, num_ctx=8192), url=ollama.url)
    (warning,) = [w for w in events_of(run, "warning") if w["code"] == "num_ctx"]
    assert warning["message"] == "num_ctx is 8192, and the model holds 1024 tokens"


def test_the_call_that_is_shown_has_the_agents_tools_and_works(export, ollama):
    _, manifest = export(ollama_spec(parity_cases=0), url=ollama.url)
    command = shlex.split(manifest["result"]["ollama"]["curl"])
    assert command[:2] == ["curl", f"{ollama.url}/api/chat"]
    answer = httpx2.post(command[1], content=command[3].encode(), timeout=60).json()
    assert answer["done"]
    assert json.loads(command[3])["tools"][0]["function"]["name"] == "calculate"


def test_what_was_tried_leaves_the_servers_memory(export, ollama):
    export(ollama_spec(parity_cases=0), url=ollama.url)
    assert any(name.startswith("dressage-staging") for name in ollama.unloaded)


def test_a_server_of_ones_own_building_is_tried_and_adapters_asked_for_first(export, with_base):
    with_base.version = "0.0.0"
    _, manifest = export(ollama_spec(parity_cases=0), url=with_base.url)
    assert manifest["failure"] is None
    with_base.version = "0.34.1"
    with pytest.raises(RunFailure, match="no new models of a base with an adapter; leave base out"):
        export(ollama_spec(base="tiny:base"), url=with_base.url)


def test_a_password_in_a_servers_address_is_shown_nowhere(export, ollama, monkeypatch):
    monkeypatch.setenv("DRESSAGE_OLLAMA_TOKEN", "t0ken")
    secret = ollama.url.replace("http://", "http://user:pa55word@")
    run, manifest = export(ollama_spec(parity_cases=0), url=secret)
    assert manifest["result"]["ollama"]["server"] == ollama.url
    assert "pa55word" not in json.dumps(manifest)
    assert "pa55word" not in (run.path / "events.jsonl").read_text()
    with pytest.raises(RunFailure) as caught:
        export(ollama_spec(), url="http://user:pa55word@127.0.0.1:1")
    assert "pa55word" not in caught.value.message
    assert "t0ken" not in json.dumps(manifest)


def test_distributions_that_cannot_be_compared_are_said_and_refuse_an_adapter(
    export, with_base, monkeypatch
):
    """A server without log-probabilities: nobody knows whether it has dropped the adapter."""
    complete = OllamaServer.complete

    def silent(self, model, request):
        answer = complete(self, model, request)
        answer["choices"][0]["finish_reason"] = "stop"
        return answer

    monkeypatch.setattr(OllamaServer, "complete", silent)
    run, manifest = export(ollama_spec(), url=with_base.url)
    assert manifest["failure"] is None
    *_, report = manifest["result"]["parity"]
    assert report["kl"] is None
    assert "whether an adapter was dropped is not known" in report["notes"][0]
    assert any(w["code"] == "parity" for w in events_of(run, "warning"))
    _, manifest = export(ollama_spec(base="tiny:base", name="on-base"), url=with_base.url)
    assert manifest["failure"]["reason"] == "parity_failed"
    assert "could not be found out" in manifest["failure"]["message"]


def test_tools_that_ollama_shows_otherwise_are_a_known_difference(export, ollama, job, arithmetic):
    """Trained with a `default` in the schema, which Ollama drops."""
    code = arithmetic.code["tools.py"].decode()
    changed = code.replace("expression: str)", 'expression: str = "1")')
    assert changed != code
    suite = Suite(arithmetic.cases, {**arithmetic.code, "tools.py": changed.encode()})
    _, manifest = export(ollama_spec(), url=ollama.url, suite=suite)
    assert manifest["failure"] is None
    *_, report = manifest["result"]["parity"]
    assert (report["same_prompt"], report["problems"]) == (1.0, [])
    assert "train with agent.tool_schema ollama" in report["notes"][0]


def test_an_adapter_that_was_not_moved_is_called_so(tmp_path, adapter):
    still = tmp_path / "still"
    shutil.copytree(adapter, still)
    weights = load_file(still / "adapter_model.safetensors")
    zeroed = {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in weights.items()}
    save_file(zeroed, still / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailure, match="training has not moved its weights"):
        merge(still, str(TINY_MODEL), tmp_path / "merged", ["x"], trained_in_4bit=False)
