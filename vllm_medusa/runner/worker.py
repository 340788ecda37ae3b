"""vLLM's CPU worker with our model runner in the place of its own."""

# Must be imported first, as vLLM's own worker module does: it sets up shared memory.
from vllm.v1.worker import cpu_worker  # isort: skip

from vllm_medusa.runner.v1 import MedusaCPUModelRunner


class MedusaCPUWorker(cpu_worker.CPUWorker):
    """``CPUWorker.init_device`` names the runner's class; we answer to that name while it runs."""

    def init_device(self) -> None:
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = MedusaCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock
