"""What we rely on in TRL beyond its documentation. Fails when an upgrade changes it."""

import copy
import inspect

import trl
from transformers import AutoTokenizer, Trainer
from trl import GRPOTrainer
from trl import chat_template_utils as templates
from trl.chat_template_utils import add_response_schema, parse_response

from app.jobs.admission.known_templates import PARSED, REPLACED, template_fingerprint
from tests.conftest import TINY_MODEL
from worker.training.update.config import UpdatePlan, grpo_config
from worker.training.update.trainer import JobTrainer


def test_the_version_is_the_one_we_read():
    assert trl.__version__ == "1.16.0"


def test_the_methods_we_override_are_there_and_called():
    assert "self.training_step(model, inputs, num_items_in_batch)" in inspect.getsource(Trainer)
    assert "def _save_checkpoint(self, model, trial)" in inspect.getsource(GRPOTrainer)
    assert set(vars(JobTrainer)) & set(vars(GRPOTrainer)) == {
        *("__init__", "__module__", "__doc__"),
        *("training_step", "_save_checkpoint", "_get_train_sampler"),
    }


def test_log_lines_are_the_means_of_what_was_noted():
    source = inspect.getsource(GRPOTrainer.log)
    assert "self._metrics[mode].items()" in source
    assert "self._metrics[mode].clear()" in source


def test_response_parsing_takes_a_prefix():
    assert list(inspect.signature(parse_response).parameters) == [
        *("tokenizer", "ids", "prefix", "tools"),
    ]
    assert callable(add_response_schema)


def test_our_configuration_is_what_trl_runs(tmp_path):
    from dressage.spec.training import TrainingSpec

    spec = TrainingSpec(batch_size=4, gradient_accumulation=2, num_generations=8, save_steps=3)
    config = grpo_config(spec, tmp_path, UpdatePlan(use_cpu=True))
    assert config.generation_batch_size == 8
    assert config.steps_per_generation == 1  # micro-batches are made within a step
    assert (config.save_strategy, config.save_steps) == ("steps", 3)
    assert (config.learning_rate, config.temperature, config.top_k) == (1e-5, 0.8, 0)
    assert (config.bf16, config.gradient_checkpointing) == (False, False)
    assert config.mask_truncated_completions is True


def test_the_api_knows_the_chat_templates_that_trl_knows():
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    parsed, replaced = {}, set()
    shipped = {
        name.removesuffix("_chat_template"): value
        for name, value in vars(templates).items()
        if name.endswith("_chat_template") and isinstance(value, str)
    }
    for name, text in shipped.items():
        own = copy.deepcopy(tokenizer)
        own.chat_template, own.response_template = text, None
        if name.endswith("_training") or not templates.supports_tool_calling(own):
            continue
        try:
            add_response_schema(own)
        except ValueError:
            continue
        parsed[template_fingerprint(text)] = name
        if not templates.is_chat_template_prefix_preserving(own):
            replaced.add(template_fingerprint(text))
    assert parsed == PARSED
    assert replaced == REPLACED
