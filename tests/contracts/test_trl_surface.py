"""What we rely on in TRL beyond its documentation. Fails when an upgrade changes it."""

import copy
import inspect

import trl
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl import chat_template_utils as templates
from trl.chat_template_utils import add_response_schema, parse_response

from app.jobs.admission.known_templates import PARSED, REPLACED, template_fingerprint
from tests.conftest import TINY_MODEL
from worker.training.update.config import grpo_config
from worker.training.update.trainer import JobTrainer


def test_the_version_is_the_one_we_read():
    assert trl.__version__ == "1.16.0"


def test_the_methods_we_override_are_there_and_called():
    assert "_generate_and_score_completions" in vars(GRPOTrainer)
    prepare = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._generate_and_score_completions(generation_batch)" in prepare
    assert "def _save_checkpoint(self, model, trial)" in inspect.getsource(GRPOTrainer)
    assert set(vars(JobTrainer)) & set(vars(GRPOTrainer)) == {
        *("__init__", "__module__", "__doc__"),
        *("_generate_and_score_completions", "_save_checkpoint", "_get_train_sampler"),
        *("_compute_loss", "_get_per_token_logps_and_entropies"),
    }


def test_the_rollout_function_gets_prompts_and_trainer_and_may_mask():
    generate = inspect.getsource(GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in generate
    assert 'extra_fields.pop("env_mask", None)' in generate


def test_the_loss_is_made_from_one_forward_pass_and_scaled_by_itself():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert source.count("self._get_per_token_logps_and_entropies(") == 1
    assert "current_gradient_accumulation_steps / self.args.steps_per_generation" in source


def test_dropped_rewards_have_no_advantage():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "advantages = torch.nan_to_num(advantages, nan=0.0)" in source


def test_response_parsing_takes_a_prefix():
    assert list(inspect.signature(parse_response).parameters) == [
        *("tokenizer", "ids", "prefix", "tools"),
    ]
    assert callable(add_response_schema)


def test_our_configuration_is_what_trl_runs(tmp_path):
    from dressage.spec.training import TrainingSpec

    spec = TrainingSpec(batch_size=4, gradient_accumulation=2, num_generations=8, save_steps=3)
    config = grpo_config(spec, tmp_path, use_cpu=True)
    assert config.generation_batch_size == 8
    assert config.steps_per_generation == 2
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
