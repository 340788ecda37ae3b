"""vLLM's V2 model runner on a CPU: Triton's interpreter executes its kernels, and ours.

vLLM uses Triton, and with it the V2 runner, only where Triton has an active driver. The stock wheel
has none for CPUs, so a placeholder that reports itself active is registered before vLLM is
imported. Slow and exact: the very code that runs on GPUs.
"""

import os

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
}

ENABLED = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether this test process runs the V2 runner: it is asked for as vLLM is asked for it."""


def enable() -> None:
    """Set the environment and register the placeholder; call before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class PlaceholderDriver(DriverBase):
        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_benchmarker(self):
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    backend = triton.backends.Backend(compiler=object, driver=PlaceholderDriver)
    triton.backends.backends["cpu"] = backend
