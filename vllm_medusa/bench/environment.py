"""Where engines of the benchmark and the demo keep compiled graphs and logs."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_medusa.paths import cache_folder


def compile_environment() -> dict[str, str]:
    """Where vLLM and torch keep compiled graphs, so that a second start is a warm one."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor"),
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
        # With ahead-of-time compilation, a warm start on the CPU compiles again.
        "VLLM_USE_AOT_COMPILE": "0",
        # GiB. By default each engine would take most of the memory for itself.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }


def memory_options(num_engines: int, on_cuda: bool) -> dict[str, float]:
    """What lets several engines be alive at once on one device, as a keyword of ``vllm.LLM``.

    Args:
        num_engines: how many share the device, Medusa's and others.
        on_cuda: whether vLLM runs on a GPU, where by default each engine asks for nearly all of the
            memory; on a CPU the key-value cache has a size of its own (``compile_environment``).
    """
    return {"gpu_memory_utilization": round(0.9 / num_engines, 3)} if on_cuda else {}


def log_file(name: str) -> Path:
    """The log of the process with this name; its folder is made."""
    folder = cache_folder() / "logs"
    folder.mkdir(exist_ok=True)
    return folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
