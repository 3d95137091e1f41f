"""Turns a GGUF file into a Hugging Face folder: `python -m cli.convert_gguf FILE FOLDER`.

Runs as a process of its own, because it loads torch and needs a gigabyte for half a minute. Says what
went wrong in the last line of stderr.
"""

import os
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, weights (float32) and tokenizer into the folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain floats now; with these, save_pretrained would look for a quantizer.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
