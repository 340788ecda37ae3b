"""What only vLLM and torch can tell. Run as ``python -m vllm_medusa.doctor.probe``.

Prints one line per fact as soon as it is known, so that what is known survives a crash:

    FACT {"name": "vllm", "value": "0.32.0"}
    FACT {"name": "plugin", "error": "ImportError: ..."}
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "FACT "

# A small target with which vLLM builds a configuration: all of it that is read.
HIDDEN_SIZE = 64
TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def ask_torch() -> str:
    """The version of torch."""
    import torch

    return torch.__version__


def ask_gpus() -> list[str]:
    """Name, compute capability and memory of each GPU that torch can use."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def ask_vllm() -> str:
    """The version of vLLM; that it can be imported is the point."""
    import vllm
    from vllm import LLM  # noqa: F401 (the package by itself imports next to nothing)

    return vllm.__version__


def ask_platform() -> str:
    """The kind of device vLLM runs on: "cpu", "cuda", ..."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def ask_kernel() -> dict[str, Any] | None:
    """The compiled kernel of tree attention on CPUs: its file, and whether it was there already.

    None where vLLM does not run on the CPU.
    """
    if ask_platform() != "cpu":
        return None
    from vllm_medusa.attention.kernels import build

    # Only build() knows the file's name, which depends on source, compiler and CPU.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-medusa"
    before = set(folder.glob("*.so"))
    path = build()
    return {"path": str(path), "cached": path in before}


def ask_seams() -> str | None:
    """How the installed vLLM differs from the one that was tested; None: it does not."""
    from vllm_medusa.manifest import SEAM_MISMATCH, check_seams

    # Whoever made a difference a warning is told of it all the same.
    tolerated = os.environ.pop(SEAM_MISMATCH, None)
    try:
        check_seams()
    except RuntimeError as error:
        return str(error)
    finally:
        if tolerated is not None:
            os.environ[SEAM_MISMATCH] = tolerated
    return None


def ask_plugin() -> None:
    """Load the plugin as vLLM does; an error says why it cannot be loaded."""
    from vllm_medusa.plugin import register

    register()


def ask_engine() -> dict[str, str]:
    """What vLLM chooses for a small target with heads; an error says why it is refused."""
    from safetensors.torch import save_file
    from torch import zeros
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    with tempfile.TemporaryDirectory() as folder:
        target, heads = Path(folder, "target"), Path(folder, "heads")
        target.mkdir()
        heads.mkdir()
        (target / "config.json").write_text(json.dumps(TARGET_CONFIG))
        (heads / "config.json").write_text('{"version": "2"}')
        weights = {"0.0.linear.weight": zeros(HIDDEN_SIZE, HIDDEN_SIZE)}
        save_file(weights, heads / "medusa_lm_head.safetensors")
        config = EngineArgs(
            model=str(target),
            skip_tokenizer_init=True,
            speculative_config={"method": "medusa", "model": str(heads), "tree": "chain"},
        ).create_engine_config()
    backend = current_platform.get_attn_backend_cls(
        config.attention_config.backend,
        # A head size as most models have it: the trial target's would rule out backends.
        AttentionSelectorConfig(
            head_size=128, dtype=config.model_config.dtype, kv_cache_dtype="auto", block_size=None
        ),
    )
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "attention": backend.rpartition(".")[2],
    }


# In the order of asking.
FACTS: dict[str, Callable[[], Any]] = {
    "torch": ask_torch,
    "gpus": ask_gpus,
    "vllm": ask_vllm,
    "platform": ask_platform,
    "kernel": ask_kernel,
    "seams": ask_seams,
    "plugin": ask_plugin,
    "engine": ask_engine,
}


def main() -> None:
    for name, ask in FACTS.items():
        fact: dict[str, Any] = {"name": name}
        try:
            fact["value"] = ask()
        except Exception as error:  # what a broken installation raises is what is asked for
            fact["error"] = f"{type(error).__name__}: {error}"
        print(MARK + json.dumps(fact), flush=True)


if __name__ == "__main__":
    main()
