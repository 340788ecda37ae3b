"""vLLM's V2 model runner on a CPU, with trees: what Triton's interpreter runs in the tests."""

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_medusa.runner.v2 import TreeModelRunner


class MedusaCPUModelRunnerV2(TreeModelRunner, CPUModelRunner):
    """The trees, and vLLM's own runner for CPUs."""
