"""`python convert_entry.py LLAMA_CPP_DIR METADATA MODEL …`: llama.cpp's converter, extended.

The converter knows a pre-tokenizer by a hash over token ids, which depends on the vocabulary: a
tokenizer trained by its user is never recognised. Where its pre-tokenizer is, to the letter, one
that llama.cpp implements, that one's name is the right answer. Our metadata goes in, too.

Runs as a script, so that nothing of ours and nothing of the converter's meet in one import path.
"""

import json
import sys
from pathlib import Path

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = {
    CONTRACTIONS + r"\p{N}" + REST: "qwen2",
    CONTRACTIONS + r"\p{N}{1,3}" + REST: "llama-bpe",
}


def main():
    """Run the converter with the look-up extended."""
    folder, metadata = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    sys.path.insert(0, folder)
    import convert_hf_to_gguf
    from conversion import base

    by_hash = base.TextModel.get_vocab_base_pre

    def by_hash_or_pattern(self, tokenizer):
        try:
            return by_hash(self, tokenizer)
        except NotImplementedError:
            name = KNOWN.get(pattern(Path(self.dir_model)))
            if name is None:
                raise
            return name

    base.TextModel.get_vocab_base_pre = by_hash_or_pattern
    gguf_parameters = base.TextModel.set_gguf_parameters

    def with_metadata(self):
        gguf_parameters(self)
        for name, value in metadata.items():
            self.gguf_writer.add_string(f"dressage.{name}", value)

    base.TextModel.set_gguf_parameters = with_metadata
    convert_hf_to_gguf.main()


def pattern(model):
    """The regular expression of a byte-level pre-tokenizer that splits by one."""
    steps = json.loads((model / "tokenizer.json").read_text())["pre_tokenizer"]
    steps = steps.get("pretokenizers", [])
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[1]["type"] == "ByteLevel":
        return steps[0]["pattern"].get("Regex")
    return None


if __name__ == "__main__":
    main()
