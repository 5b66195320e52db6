import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dressage.spec.agent import canonical_model_name
from dressage.spec.effective import effective_spec, valid_accumulation
from dressage.spec.export import OllamaExport, canonical_ollama_name
from dressage.spec.job import EXAMPLE, JobSpec
from dressage.spec.training import LoraSpec, TrainingSpec


def spec(**changes):
    return JobSpec.model_validate({**EXAMPLE, **changes})


def test_the_documented_example_survives_a_round_trip():
    assert JobSpec.model_validate_json(spec().model_dump_json()) == spec()


def test_the_defaults_are_the_vetted_ones():
    training = TrainingSpec()
    assert (training.epochs, training.batch_size, training.gradient_accumulation) == (1, 2, 2)
    assert (training.learning_rate, training.max_grad_norm) == (1e-5, 1.0)
    assert (training.num_generations, training.max_completion_length) == (4, 1024)
    assert (training.temperature, training.max_tool_iterations, training.seed) == (0.8, 5, 0)
    assert training.mask_truncated_completions is True
    assert (training.logging_steps, training.save_steps, training.lora) == (5, None, None)
    assert (training.dtype, training.gradient_checkpointing) == ("bfloat16", False)
    lora = LoraSpec()
    assert (lora.r, lora.alpha, lora.dropout, lora.target_modules) == (16, 32, 0.05, "all-linear")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"colour": "red"}, "colour"),
        ({"training": {"learning_rat": 1}}, "training.learning_rat"),
        ({"training": {"num_generations": 1}}, "training.num_generations"),
        ({"agent": {"instructions": "x"}}, "agent.model"),
        ({"exports": [{"type": "gguf", "quantization": "q3"}]}, "exports.0.gguf.quantization"),
    ],
)
def test_a_wrong_field_is_named(changes, where):
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    assert [".".join(map(str, e["loc"])) for e in caught.value.errors()] == [where]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rewards": []}, "at least one measure"),
        ({"rewards": ["a", "b"], "reward_weights": [1.0]}, "1 weights for 2 rewards"),
        ({"rewards": ["a", "a"]}, "named once"),
        ({"agent": {**EXAMPLE["agent"], "tools": ["x", "x"]}}, "more than once: x"),
        ({"agent": {**EXAMPLE["agent"], "instructions": print}}, "static string, not a callable"),
        ({"exports": [{"type": "gguf"}, {"type": "gguf"}]}, "asked for twice"),
        ({"agent": {**EXAMPLE["agent"], "instructions": "a\x00b"}}, "NUL"),
        ({"training": {"max_staleness": 2}}, "max_staleness needs vllm"),
        ({"training": {"max_staleness": 2, "vllm": {"sleep": True}}}, "never rests"),
        (
            {"training": {"max_staleness": 2, "vllm": {}, "resample_dead_groups": 1}},
            "resample_dead_groups needs max_staleness 0",
        ),
    ],
)
def test_what_does_not_make_sense_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        spec(**changes)


def test_weights_may_stand_beside_the_measures():
    rewards = spec(rewards=["a", "b"], reward_weights=[1.0, -0.2]).rewards
    assert [(r.measure, r.weight) for r in rewards] == [("a", 1.0), ("b", -0.2)]


@pytest.mark.parametrize(
    "spelling",
    [
        "Org/Name",
        "hf.co/Org/Name-GGUF:Q8_0",
        "litellm/ollama_chat/hf.co/Org/Name-GGUF:Q8_0",
        "ollama/hf.co/Org/Name-gguf",
        "https://huggingface.co/Org/Name",
        " Org/Name ",
    ],
)
def test_every_spelling_of_a_hub_model_is_one_name(spelling):
    assert canonical_model_name(spelling) == "Org/Name"


def test_a_directory_keeps_its_name():
    assert canonical_model_name("/models/My-GGUF:x") == "/models/My-GGUF:x"


@given(st.integers(1, 64), st.integers(1, 64), st.integers(2, 64))
def test_accumulation_is_raised_to_the_smallest_valid_value(batch, accumulation, generations):
    valid = valid_accumulation(batch, accumulation, generations)
    assert valid >= accumulation
    assert batch * valid % generations == 0
    assert all(batch * tried % generations for tried in range(accumulation, valid))


def test_every_change_is_listed_with_its_reason():
    requested = spec(
        agent={"model": "hf.co/Org/Name-GGUF:Q8_0"},
        training={"batch_size": 3, "num_generations": 4},
    )
    effective, adjustments = effective_spec(requested, suite="arithmetic@7")
    assert effective.agent.model == "Org/Name"
    assert effective.training.gradient_accumulation == 4
    assert effective.suite == "arithmetic@7"
    assert {a.field: (a.requested, a.effective) for a in adjustments} == {
        "agent.model": ("hf.co/Org/Name-GGUF:Q8_0", "Org/Name"),
        "suite": ("arithmetic", "arithmetic@7"),
        "training.gradient_accumulation": (2, 4),
        "training.dtype": (
            "bfloat16",
            "float32 weights, bfloat16 for passes and in the result",
        ),
    }
    assert all(a.reason for a in adjustments)


def test_layers_are_compiled_where_it_pays_and_the_job_says_so():
    fast = {"lora": {}, "vllm": {}}
    for training, gpus, compiled in (
        (fast, 1, True),
        (fast, 0, False),
        ({**fast, "load_in_4bit": True}, 1, False),
        ({**fast, "gradient_checkpointing": True}, 1, False),
        ({**fast, "compile": False}, 1, False),
        ({"lora": {}}, 1, False),
    ):
        requested = spec(training=training, resources={"gpus": gpus})
        effective, adjustments = effective_spec(requested, suite="arithmetic@7")
        assert effective.training.compiles(gpus=gpus) is compiled
        assert ("training.compile" in [a.field for a in adjustments]) is compiled


def test_names_of_trl_for_vllm_are_understood():
    training = TrainingSpec.model_validate(
        {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 2048}
    )
    assert (training.vllm.gpu_memory_utilization, training.vllm.max_model_len) == (0.5, 2048)
    assert TrainingSpec.model_validate({"use_vllm": False}).vllm is None
    with pytest.raises(ValidationError, match="false only without vllm"):
        TrainingSpec.model_validate({"use_vllm": False, "vllm": {}})


def test_a_stored_specification_of_the_first_version_still_loads():
    golden = json.loads(
        '{"spec_version": 1, "name": "n", "agent": {"model": "Org/Name", "instructions": null, '
        '"tools": []}, "suite": "s@1", "rewards": [{"measure": "m", "weight": 1.0}], "training": '
        '{"epochs": 1.0, "batch_size": 2, "lora": {"r": 16, "alpha": 32, "dropout": 0.05, '
        '"target_modules": "all-linear"}}, "evaluation": {"holdout": 0.2}, "exports": '
        '[{"type": "merged"}, {"type": "gguf", "quantization": "f16"}], "resources": {"gpus": 1}, '
        '"priority": "normal"}'
    )
    assert JobSpec.model_validate(golden).exports[1].quantization == "f16"


def test_names_of_ollama_are_one_when_they_are_one_model():
    same = {canonical_ollama_name(n) for n in ("calc", "Calc", "calc:latest", "CALC:Latest")}
    assert same == {"calc"}
    others = ("team/x", "team_x", "team/x:1", "team/x_1", "host:5000/team/x", "host/team/x")
    assert len({canonical_ollama_name(name) for name in others}) == len(others)
    assert OllamaExport(type="ollama", name="host:5000/team/x:q4").export_name == (
        "ollama-host+5000~team~x+q4"
    )


def test_without_training_a_model_is_only_measured():
    only = spec(training=None, exports=[])
    assert only.evaluation.only
    assert only.preflight.cases == 0
    assert only.training.weights_dtype == "bfloat16"
    assert only.planned_steps(100) == 1
    for changes, text in (
        ({"exports": [{"type": "merged"}]}, "nothing to export"),
        ({"exports": [], "evaluation": {"holdout": 0}}, "needs held-out cases"),
        ({"exports": [], "evaluation": {"every_steps": 2}}, "every_steps needs training"),
    ):
        with pytest.raises(ValidationError, match=text):
            spec(training=None, **changes)
