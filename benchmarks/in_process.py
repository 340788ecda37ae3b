"""The engine of the benchmarks that look into it: in this process, one request after the other."""

import os
from typing import Any

from vllm_medusa.bench.environment import compile_environment


def start(model: str, heads: str, nodes: int, eager: bool, **speculation: Any) -> Any:
    """Start vLLM's ``LLM`` with Medusa, in float32.

    Args:
        model: the target.
        heads: its heads.
        nodes: the most that a step may verify.
        eager: do not compile the model.
        speculation: further keys of ``speculative_config``.
    """
    os.environ |= compile_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=eager,
        speculative_config={
            "method": "medusa",
            "model": heads,
            "num_speculative_tokens": nodes,
            **speculation,
        },
    )
