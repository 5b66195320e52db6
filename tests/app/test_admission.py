"""What is known of a job before a GPU is used: its suite, measures, names and tools."""

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from dressage.authoring import Suite
from dressage.spec.suite import Case
from dressage.spec.training import EvaluationSpec
from tests.servers import bearer

CODE = b"""
from dressage.authoring import function_tool, measure, pass_reason

@function_tool
def calculate(expression: str, digits: int = 3) -> str:
    \"\"\"Calculate.\"\"\"
    return expression

@measure
def fine(context):
    return pass_reason("ok")
"""


@pytest.fixture
def check(api, job_spec):
    """`check(records, **changes)`: a dry run on a suite of these cases."""

    def go(records, **changes):
        suite = Suite.from_records(records)
        suite = Suite(suite.cases, {"code.py": CODE})
        sent = api.post("/suites", params={"name": "own"}, content=suite.to_archive())
        assert sent.status_code in (200, 201), sent.text
        spec = {**job_spec, "suite": "own", "rewards": ["fine"], **changes}
        return api.post("/jobs?dry_run=true", json=spec)

    return go


def cases(count, **more):
    return [
        {"id": f"c{n}", "input": f"question {n}", "expect": {"answer": n}, **more}
        for n in range(count)
    ]


def problems(response):
    assert response.status_code == 422, response.text
    return {e["field"]: e["message"] for e in response.json()["errors"]}


@pytest.mark.parametrize(
    ("kind", "records", "sentence"),
    [
        ({"type": "numeric"}, cases(30), None),
        ({"type": "numeric", "field": "sum"}, cases(30), "no case has expect.sum; the cases have"),
        (
            {"type": "numeric"},
            [*cases(29), {"id": "odd", "input": "x", "expect": {"answer": "seven"}}],
            "expect.answer is no number in 1 of 30 cases: 'odd'",
        ),
        (
            {"type": "exact_match"},
            [*cases(23), *({"id": f"bare{n}", "input": f"b{n}"} for n in range(7))],
            "7 of 30 cases have no expect.answer: 'bare0', 'bare1', 'bare2', 'bare3', 'bare4' and "
            "2 more",
        ),
        (
            {"type": "contains"},
            [*cases(29), {"id": "null", "input": "x", "expect": {"answer": None}}],
            "1 of 30 cases have no expect.answer: 'null'",
        ),
    ],
)
def test_measures_are_checked_against_every_case(check, kind, records, sentence):
    response = check(records, rewards=[{"measure": kind}])
    if sentence is None:
        assert response.status_code == 200, response.text
    else:
        assert sentence in problems(response)["rewards.0.measure.field"]


def test_choosing_and_proving_need_two_halves(check):
    few = cases(12)
    evaluation = {"holdout": 0.001, "every_steps": 1}
    places = [Case.model_validate(case).place for case in few]
    assert EvaluationSpec(**evaluation).boundary(places) == min(places) + 1
    message = problems(check(few, evaluation=evaluation))["evaluation.every_steps"]
    assert "1 of the suite's 12 cases are held out: at least 2" in message


def test_what_will_not_be_shown_is_said(check):
    warnings = check(
        cases(30),
        rewards=[{"measure": "fine", "weight": -1}],
        training={"max_steps": 2, "warmup_steps": 5, "dtype": "float32"},
        evaluation={"holdout": 0.01},
    ).json()["warnings"]
    said = " ".join(warnings)
    assert "an interval of the gain needs 5" in said
    assert "no reward says when a case is solved" in said
    assert "the learning rate rises for 5 steps, and the job has 2" in said


def test_a_cases_own_system_message_follows_the_instructions(check):
    own = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    response = check([*cases(30), {"id": "own", "input": own}])
    said = " ".join(response.json()["warnings"])
    assert "1 cases have a system message of their own ('own')" in said
    conversation = Case(id="own", input=own).conversation("Be brief.")
    assert conversation == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "hi"},
    ]


def test_a_job_that_exports_to_ollama_trains_with_tools_as_ollama_shows_them(
    check, settings, job_spec
):
    check(cases(30))  # stores the suite
    secret = "http://user:password@gpu-7:11434"
    allowed = settings.model_copy(update={"ollama_urls": [secret]})
    export = {"type": "ollama", "name": "x"}
    spec = {**job_spec, "suite": "own", "rewards": ["fine"], "exports": [export]}
    with TestClient(create_app(allowed), headers=bearer("operator")) as other:
        body = other.post("/jobs?dry_run=true", json=spec).json()
        wrong = {**export, "server": "http://elsewhere"}
        refused = other.post("/jobs", json={**spec, "exports": [wrong]})
        named = {**export, "server": "http://gpu-7:11434"}
        assert other.post("/jobs", json={**spec, "exports": [named]}).status_code == 201
    assert body["spec"]["agent"]["tool_schema"] == "ollama"
    (dropped,) = [a for a in body["adjustments"] if a["field"].startswith("agent.tools")]
    assert dropped["field"] == "agent.tools.calculate.digits.default"
    assert "allowed: http://gpu-7:11434" in refused.text
    assert "password" not in refused.text


@pytest.mark.parametrize(
    ("model", "canonical"),
    [
        ("huggingface/CodeBERTa-small-v1", "huggingface/CodeBERTa-small-v1"),
        ("huggingface/Org/Name", "Org/Name"),
        ("litellm/ollama_chat/hf.co/Org/Name-GGUF:Q8_0", "Org/Name"),
        ("gpt2", "gpt2"),
    ],
)
def test_only_known_prefixes_are_cut_from_a_name(check, job_spec, model, canonical):
    response = check(cases(30), agent={**job_spec["agent"], "model": model})
    assert response.json()["spec"]["agent"]["model"] == canonical


def test_a_name_of_ollamas_library_has_no_owner_and_is_refused(check, job_spec):
    response = check(cases(30), agent={**job_spec["agent"], "model": "ollama_chat/qwen3:0.6b"})
    assert "Org/Name" in problems(response)["agent.model"]


def test_names_of_trl_are_taken_and_shown_as_adjustments(check):
    training = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "torch_dtype": "float32",
        "use_lora": True,
        "lora_r": 8,
        "world_model_coeff": 0.1,
        "report_to": "none",
    }
    body = check(cases(30), training=training).json()
    effective = body["spec"]["training"]
    assert (effective["epochs"], effective["batch_size"]) == (2, 4)
    assert (effective["lora"]["r"], effective["echo"]["coeff"]) == (8, 0.1)
    assert (effective["dtype"], effective["report_to"]) == ("float32", [])
    renamed = {a["field"]: a["effective"] for a in body["adjustments"]}
    assert renamed["training.per_device_train_batch_size"] == "training.batch_size"
    assert renamed["training.world_model_coeff"] == "training.echo.coeff"


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"epochs": 1, "num_train_epochs": 2}, "are one field: give one of them"),
        ({"lora": {"r": 3}, "lora_r": 4}, "lora_r and lora.r are one field"),
        ({"lora": 5, "lora_r": 4}, "lora is no object"),
        ({"use_lora": "yes"}, "use_lora is true or false"),
        ({"use_lora": False, "lora": {"r": 1}}, "false only without lora"),
        ({"lora_r": {}}, "valid integer"),
    ],
)
def test_a_field_under_two_names_or_of_no_sense_is_refused(check, training, sentence):
    assert sentence in check(cases(30), training=training).json()["detail"]


@pytest.mark.parametrize("targets", [[], None, "all-linear"])
def test_no_targets_are_all_targets(check, targets):
    training = {"lora": {"target_modules": targets}, "dtype": "float32"}
    body = check(cases(30), training=training).json()
    assert body["spec"]["training"]["lora"]["target_modules"] == "all-linear"


def test_whole_weights_are_trained_in_float32_and_that_is_said(check):
    body = check(cases(30), training={"dtype": "bfloat16"}).json()
    (adjusted,) = [a for a in body["adjustments"] if a["field"] == "training.dtype"]
    assert adjusted["effective"].startswith("float32 weights")
    body = check(cases(30), training={"dtype": "bfloat16", "lora": {}}).json()
    assert all(a["field"] != "training.dtype" for a in body["adjustments"])


def test_equal_cases_under_other_ids_are_counted(api):
    same = [*cases(3), {"id": "again", "input": "question 1", "expect": {"answer": 1}}]
    suite = Suite.from_records(same)
    stored = api.post("/suites", params={"name": "twice"}, content=suite.to_archive()).json()
    assert stored["repeated_cases"] == 1


def test_layers_that_are_not_in_a_local_model_are_named(check):
    lora = {"target_modules": ["q_proj", "v_porj"]}
    told = problems(check(cases(30), training={"lora": lora, "dtype": "float32"}))
    message = told["training.lora.target_modules"]
    assert message.startswith("the model has no layer v_porj; it has down_proj, gate_proj")
    lora["target_modules"] = ["q_proj", "self_attn.v_proj"]
    assert check(cases(30), training={"lora": lora, "dtype": "float32"}).status_code == 200


def test_what_only_a_gpu_can_do_is_refused_without_one(check):
    lora = {"lora": {"r": 4}}
    told = problems(
        check(cases(4), training={**lora, "vllm": {}, "load_in_4bit": True}, resources={"gpus": 0})
    )
    assert told.keys() == {"training.vllm", "training.load_in_4bit"}
    assert "vLLM needs a CUDA GPU; set resources.gpus to 1" in told["training.vllm"]
    told = problems(check(cases(4), training={**lora, "vllm": {}}, resources={"gpus": 2}))
    assert "vLLM writes for one card, and resources.gpus is 2" in told["training.vllm"]
    fine = check(cases(4), training={**lora, "use_vllm": True, "max_staleness": 2})
    assert problems(fine)["training.vllm"]  # the job of these tests has no GPU


def test_compiled_layers_are_an_adjustment(check):
    answer = check(cases(4), training={"lora": {"r": 4}, "vllm": {}}, resources={"gpus": 1}).json()
    (change,) = [a for a in answer["adjustments"] if a["field"] == "training.compile"]
    assert (change["requested"], change["effective"]) == (None, True)
    assert answer["spec"]["training"]["compile"] is True
