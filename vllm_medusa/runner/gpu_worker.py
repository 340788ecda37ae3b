"""vLLM's GPU worker with our model runner in the place of its own."""

from vllm.v1.worker import gpu_worker


class MedusaGPUWorker(gpu_worker.Worker):
    """A worker makes its runner in a method that vLLM means to be overridden."""

    def _make_model_runner(self):  # type: ignore[no-untyped-def]
        from vllm_medusa.runner.v2 import TreeModelRunner

        return TreeModelRunner(self.vllm_config, self.device)
