"""Load a base model and its tokenizer, from the hub or a directory."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)

# Of a generation configuration, and without a part in how a token is drawn.
HARMLESS = (
    *("output_attentions", "output_hidden_states", "use_cache", "return_dict_in_generate"),
    *("transformers_version", "_from_model_config", "do_sample", "max_length"),
)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, with a padding token.

    Raises:
        RunFailure: There is no such model, or it has no usable tokenizer.
    """
    _require_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RunFailure(
            Reason.MODEL_UNSUPPORTED, f"the tokenizer of {name!r} cannot be loaded: {_first(error)}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, *, dtype: str, use_cpu: bool, in_4bit: bool = False) -> Any:
    """A causal language model on the GPU, or on the CPU.

    Raises:
        RunFailure: There is no such model, it is not a causal language model, or a 4-bit base is
            asked for where there is no CUDA or no bitsandbytes.
    """
    _require_model(name)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if in_4bit:
        _require_4bit()
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        options["device_map"] = {"": _own_gpu()}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise RunFailure(
            Reason.MODEL_UNSUPPORTED, f"the model {name!r} cannot be loaded: {_first(error)}"
        ) from error
    _forget_sampling(model, name)
    if in_4bit:
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model if use_cpu else model.to(f"cuda:{_own_gpu()}")


def _forget_sampling(model: Any, name: str) -> None:
    """Leave the drawing of tokens to who asks: what a model's authors prefer is another policy."""
    given = model.generation_config
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{key: getattr(given, key) for key in ids})
    left_out = {
        key: value for key, value in given.to_diff_dict().items() if key not in (*ids, *HARMLESS)
    }
    if left_out:
        log.warning(
            "the model %s asks for %s when it is sampled; rollouts are drawn as the job says alone",
            *(name, ", ".join(f"{key} {value}" for key, value in sorted(left_out.items()))),
        )


def require_gpus(count: int) -> None:
    """Check that this process' GPU can be used, before anything is trained on a CPU by mistake.

    Raises:
        RunFailure: The worker said that it has the GPUs, and it has not, or they do not work.
    """
    found = torch.cuda.device_count()
    if found < count:
        raise RunFailure(
            Reason.GPU_FAILED, f"the job was given {count} GPUs, and CUDA finds {found}"
        )
    try:
        torch.ones(1, device=f"cuda:{_own_gpu()}").add(1).item()
    except RuntimeError as error:
        raise RunFailure(Reason.GPU_FAILED, f"the GPU cannot be used: {_first(error)}") from error


def _own_gpu() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _require_4bit() -> None:
    if not torch.cuda.is_available():
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            "training.load_in_4bit needs a CUDA GPU; this worker has none",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            "training.load_in_4bit needs the package bitsandbytes on the worker",
        )


def turn_end(tokenizer: Any) -> int | None:
    """The control token that the chat template writes after what the assistant says, if any.

    A model's `eos_token_id` may be another one (Qwen2.5 base, Gemma 1): its turns would never end.
    """
    mark = "said7f3a"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError):  # said elsewhere
        return None
    rest = text.rpartition(mark)[2].lstrip()
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def end_ids(name: str, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a turn of the model of this name, which need not be loaded."""
    try:
        own = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # a model need not have one
        own = AutoConfig.from_pretrained(name).get_text_config().eos_token_id
    return all_ends(own, tokenizer)


def all_ends(own: int | list[int] | None, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a turn: a model's `eos_token_id`, its tokenizer's and its template's."""
    ends = own if isinstance(own, list) else [own]
    found = [*ends, tokenizer.eos_token_id, turn_end(tokenizer)]
    return frozenset(token for token in found if token is not None)


def context_length(config: Any) -> int:
    """Tokens of prompt and completion that a model of this configuration can hold."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else sys.maxsize


def language_model(model: Any) -> Any:
    """The causal language model itself; an adapter's layers stay active inside it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@dataclass(frozen=True)
class Head:
    """From last hidden states to logits as the model itself makes them.

    Attributes:
        output: The output layer.
        scale: What its values are multiplied by (Cohere's `logit_scale`; Granite divides).
        softcap: Of the scaled values, for models that have one (Gemma).
    """

    output: Any
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in single precision."""
        logits: torch.Tensor = self.output(hidden).float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def head_of(model: Any) -> Head:
    """The head of a causal language model; the same rules as `trl.trainer.utils` has."""
    config = model.config.get_text_config()
    multipliers = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    found = [getattr(config, name, None) for name in multipliers]
    scale = next((value for value in found if value is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return Head(
        model.get_output_embeddings(),
        1.0 if scale is None else float(scale),
        getattr(config, "final_logit_softcapping", None),
    )


@contextmanager
def last_hidden_states(backbone: Any, *, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Collect the last hidden states of every forward pass inside the block, if wanted."""
    collected: list[torch.Tensor] = []
    if not wanted:
        yield collected
        return

    def keep(_module: Any, _arguments: Any, output: Any) -> None:
        collected.append(output.last_hidden_state)

    hook = backbone.register_forward_hook(keep)
    try:
        yield collected
    finally:
        hook.remove()


def _require_model(name: str) -> None:
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        local = name.startswith(("/", ".", "~"))
        where = "no model directory" if local and not Path(name).exists() else "no usable model"
        raise RunFailure(
            Reason.MODEL_NOT_FOUND, f"there is {where} {name!r}: {_first(error)}"
        ) from error


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
