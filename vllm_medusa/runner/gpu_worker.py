"""vLLM's GPU worker with our model runner in the place of its own."""

from vllm.v1.worker import gpu_worker


class MedusaGPUWorker(gpu_worker.Worker):
    """A worker makes its runner in a method that vLLM means to be overridden."""

    def _make_model_runner(self):  # type: ignore[no-untyped-def]
        from vllm_medusa.runner.v2 import TreeModelRunner

        return TreeModelRunner(self.vllm_config, self.device)

    def sleep(self, level: int = 1) -> None:
        """As vLLM's; its level 2 throws all weights away and brings back the target's only.

        Raises:
            ValueError: level 2.
        """
        if level > 1:
            raise ValueError("medusa cannot sleep at level 2, which discards the heads: use 1")
        super().sleep(level)
