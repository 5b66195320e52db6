"""A 1,024-entry byte-level BPE with Qwen2's pre-tokenizer (every digit is one token).

The chat template is Qwen3-Instruct-2507's, whose two long fixed texts become one token each: a
prompt stays short, and so does a training step.
"""

import json
import random

from make_cases import questions
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tools import calculate
from transcripts import MIXED, transcript
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_instruct_2507_chat_template as TEMPLATE

INSTRUCTIONS = "Solve the exercise. Use the calculator."
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fixed_text(start, end):
    """A string literal inside the template, without its quotes and escapes."""
    text = TEMPLATE[TEMPLATE.index(start) + 1 :]
    return json.loads('"' + text[: text.index(end)] + '"')


HEAD = fixed_text('"# Tools', '" }}')
TAIL = fixed_text('"\\n</tools>', "<|im_end|>")


def build(size=1024):
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=size - 16,
            min_frequency=20,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    markup = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    plain = (*markup, "<think>", "</think>", HEAD, TAIL)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def corpus():
    rng = random.Random(0)
    for question in questions("pretraining", 3000):
        yield question.text
        yield from (text for _, text in transcript(rng, question, MIXED))
    yield from [json.dumps(calculate.schema)] * 200
    yield from ["\nsystem\nuser\nassistant\n"] * 500
    yield from [INSTRUCTIONS] * 200
    yield from [HEAD, TAIL] * 3
