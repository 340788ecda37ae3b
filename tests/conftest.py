"""Environment of all tests: set before vLLM is imported.

With ``VLLM_USE_V2_MODEL_RUNNER=1`` the integration tests run the V2 runner, in Triton's
interpreter.
"""

import os

import pytest

from tests import triton_interpreter

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

if triton_interpreter.ENABLED:
    triton_interpreter.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``v1_only(reason)`` marks tests that the V2 runner need not or cannot run here."""
    marker = item.get_closest_marker("v1_only")
    if marker and triton_interpreter.ENABLED:
        pytest.skip(marker.kwargs["reason"])
