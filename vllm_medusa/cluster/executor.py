"""vLLM's Ray executor, which looks at the nodes before it starts workers there."""

import vllm.envs as envs
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_utils import (
    get_bundles_for_indices,
    get_bundles_sorted_by_node,
    initialize_ray_cluster,
)

from vllm_medusa.cluster.nodes import Node, check_nodes


class MedusaRayExecutor(RayExecutorV2):
    """``RayExecutorV2`` with a check in front.

    The configuration names this class in the place of "ray" (``support.choose_executor``), so that
    every way to start vLLM comes through here.
    """

    def _init_executor(self) -> None:
        # What the parent begins with: connect to Ray and reserve a device per worker. Its own call
        # then finds both done.
        initialize_ray_cluster(self.parallel_config, require_gpu_on_driver=False)
        config = self.vllm_config.speculative_config
        check_nodes(self._nodes(), config.model, config.revision)
        # Workers get a copy of the configuration, and some of their code compares this name.
        self.parallel_config.distributed_executor_backend = "ray"
        super()._init_executor()

    def _nodes(self) -> list[Node]:
        """The nodes that workers will run on, each once."""
        group, world_size = self.parallel_config.placement_group, self.parallel_config.world_size
        if envs.VLLM_RAY_BUNDLE_INDICES:
            indices = [int(index) for index in envs.VLLM_RAY_BUNDLE_INDICES.split(",")]
            bundles = get_bundles_for_indices(group, indices, world_size)
        else:
            bundles = get_bundles_sorted_by_node(group)[:world_size]
        return list(dict.fromkeys(Node(node_id, address) for _, node_id, address in bundles))
