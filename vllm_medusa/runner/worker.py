"""vLLM's CPU worker with our model runner in the place of its own."""

# Must be imported first, as vLLM's own worker module does: it sets up shared memory.
from vllm.v1.worker import cpu_worker  # isort: skip

import importlib
from typing import Any


class MedusaCPUWorker(cpu_worker.CPUWorker):
    """``CPUWorker.init_device`` names the runner's class; we answer to that name while it runs."""

    def init_device(self) -> None:
        # Only the one that is used can be imported: V2 needs Triton.
        module: Any
        ours: type
        if self.use_v2_model_runner:
            module = importlib.import_module("vllm.v1.worker.cpu.model_runner")
            from vllm_medusa.runner.v2_cpu import MedusaCPUModelRunnerV2

            ours = MedusaCPUModelRunnerV2
        else:
            module = cpu_worker
            from vllm_medusa.runner.v1 import MedusaCPUModelRunner

            ours = MedusaCPUModelRunner
        stock = module.CPUModelRunner
        module.CPUModelRunner = ours
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = stock
