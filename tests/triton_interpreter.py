"""Triton without a GPU: its interpreter executes the very kernels that are compiled for GPUs.

vLLM imports its kernels as they are only where Triton has an active backend, and Triton's wheel has
none for CPUs: a placeholder that reports itself active is registered before vLLM is imported. That
changes what vLLM does all over the process, so such tests run in a process of their own, one folder
an invocation of pytest. The conftest.py of such a folder says::

    def pytest_configure(config):
        triton_interpreter.enable_for(config, Path(__file__).parent)

    def pytest_collection_modifyitems(config, items):
        triton_interpreter.skip_unless_enabled(items, Path(__file__).parent)

The integration tests run in it too, on the V2 runner, if ``VLLM_USE_V2_MODEL_RUNNER`` is 1 when
pytest starts (tests/conftest.py).

Worker processes that a test starts need ``enable`` too, before they import vLLM.
"""

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ENABLED = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether the integration tests run vLLM's V2 runner: asked for as vLLM is asked for it."""

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: the one with the placeholder
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "HF_HUB_OFFLINE": "1",
}


def enable() -> None:
    """Set the environment and register the placeholder.

    Raises:
        RuntimeError: vLLM was imported before.
    """
    os.environ.update(ENVIRONMENT)
    register_placeholder()
    _multiply_bfloat16()
    _take_any_mask()
    _leave_out_what_has_no_effect()
    import torch

    # vLLM's Triton backend sizes a launch by it, unasked whether there is CUDA.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)


def register_placeholder(target: tuple[str, int, int] = ("cpu", 0, 1)) -> None:
    """Have vLLM see an active Triton backend named "cpu".

    Args:
        target: what it says its device is; see ``triton.backends.compiler.GPUTarget``.

    Raises:
        RuntimeError: vLLM was imported before.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("Triton's placeholder must be registered before vllm is imported")
    import torch
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Placeholder(DriverBase):
        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*target)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_benchmarker(self) -> None:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=object, driver=Placeholder)


def _multiply_bfloat16() -> None:
    """Triton 3.9's interpreter keeps bfloat16 as the bits of whole numbers, and ``tl.dot``
    multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock = InterpreterBuilder.create_dot

    def widen(handle: TensorHandle) -> TensorHandle:
        if handle.get_element_ty() != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object):
        return stock(self, widen(a), widen(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _take_any_mask() -> None:
    """The interpreter takes masks of bits only; compiled, a mask that is a whole number (what a sum
    or a loop variable may make of it in some of vLLM's kernels) is as good."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def bits(mask: TensorHandle) -> TensorHandle:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def create_masked_load(self: InterpreterBuilder, pointers, mask, *rest: object):
        return load(self, pointers, bits(mask), *rest)

    def create_masked_store(self: InterpreterBuilder, pointers, value, mask, *rest: object):
        return store(self, pointers, value, bits(mask), *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def _leave_out_what_has_no_effect() -> None:
    """About half of the time of an engine's step goes into three things. The interpreter puts its
    own functions in the place of the language's at every launch and takes them back after it: only
    kernels use the language here, it may stay so. It looks types up in a table that it makes anew
    every time. And it computes whether whole numbers overflow, but says so only in debug mode."""
    import numpy as np
    from triton.runtime import interpreter

    patch_language, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[str] = set()
    types: dict[str, np.dtype] = {}

    def patch_language_once(kernel):
        kind = "core" if interpreter.tl.core in kernel.__globals__.values() else "language"
        if kind not in patched:
            patched.add(kind)
            patch_language(kernel)
        return interpreter._LangPatchScope()

    def known_numpy_type(type_):
        name = type_.scalar.name
        if name not in types:
            types[name] = numpy_type(type_)
        return types[name]

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_language_once
    interpreter._get_np_dtype = known_numpy_type


def has_gpu() -> bool:
    """Then kernels are compiled for it, and the interpreter stays off."""
    import torch

    return torch.cuda.is_available()


def enable_for(config: pytest.Config, folder: Path) -> None:
    """Enable the interpreter if the tests of ``folder`` are all that this process runs."""
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args]
    is_alone = all(path.resolve().is_relative_to(folder.resolve()) for path in asked)
    if is_alone and not has_gpu():
        enable()


def skip_unless_enabled(items: Iterable[pytest.Item], folder: Path) -> None:
    """Skip the tests of ``folder`` where there is neither a GPU nor the interpreter."""
    if os.environ.get("TRITON_INTERPRET") or has_gpu():
        return
    mark = pytest.mark.skip(reason=f"needs its own process: pytest {os.path.relpath(folder)}")
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(mark)
