"""Tests of Triton kernels: on a GPU where there is one, else in Triton's interpreter.

They run in a process of their own: ``pytest tests/unit_triton``.
"""

from pathlib import Path

import pytest

from tests import triton_interpreter

FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    triton_interpreter.enable_for(config, FOLDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    triton_interpreter.skip_unless_enabled(items, FOLDER)


@pytest.fixture(
    params=[
        "interpreter",
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors are and kernels run."""
    if request.param == "gpu":
        if not triton_interpreter.has_gpu():
            pytest.skip("no GPU")
        return "cuda"
    if triton_interpreter.has_gpu():
        pytest.skip("a GPU is there: kernels are compiled for it")
    return "cpu"
