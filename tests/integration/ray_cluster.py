"""Ray clusters of several nodes on this machine, which end with the test whatever happens."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "ray_stand_in"
LOOPBACK = "127.0.0.1"
# Ray turns loopback addresses into those of the machine's network, but where this is "0".
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
GIGABYTE = 2**30
START_SECONDS = 180


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        address: of its head, as RAY_ADDRESS takes it.
        nodes: Ray's ids of the nodes, in the order in which they were asked for.
        environment: what processes that connect to it need in their environment.
    """

    address: str
    nodes: list[str]
    environment: dict[str, str]

    def run(self, arguments: Sequence[str], timeout: float = 900, **environment: str):
        """Run a Python process connected to the cluster, and what it starts, to its end."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            end(descendants(process.pid))
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextmanager
def ray_cluster(*nodes: Mapping[str, str], num_cpus: int = 2) -> Iterator[RayCluster]:
    """Start a node with one declared accelerator for each environment.

    Args:
        nodes: environment variables of each node's processes, besides the common ones.
        num_cpus: declared for each node.
    """
    from ray._private import services
    from ray.cluster_utils import Cluster

    before = {process.pid for process in descendants(os.getpid())}
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it holds the names of sockets
    common = {
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": f"{STAND_IN}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        LOOPBACK_ONLY: "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_agent_register_timeout_ms": str(START_SECONDS * 1000),
        "RAY_worker_register_timeout_seconds": str(START_SECONDS),
        # Nothing of a test is worth killing a process of it when memory gets scarce.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_TMPDIR", str(folder))  # read by Cluster too
    patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # what it is read into
    # Each node starts an agent for Ray's dashboard, which has nobody to look at it. Told that its
    # packages are missing, Ray starts a small one.
    patch.setattr("ray._private.utils.get_dashboard_dependency_error", lambda: "not needed")
    # A busy machine needs longer than the 30 s that Ray waits.
    patch.setattr("ray._private.services.get_node", patiently(services.get_node))
    cluster = Cluster()
    try:
        started = [
            cluster.add_node(
                num_cpus=num_cpus,
                num_gpus=1,
                env_vars=common | environment,
                node_ip_address=LOOPBACK,
                include_dashboard=False,
                object_store_memory=GIGABYTE // 8,
            )
            for environment in nodes
        ]
        cluster.wait_for_nodes()
        yield RayCluster(
            cluster.address,
            [node.node_id for node in started],
            common | {"RAY_ADDRESS": cluster.address},
        )
    finally:
        # The nodes' processes are ours, and workers and what they start are theirs.
        started = descendants(os.getpid())[1:]
        try:
            cluster.shutdown()
        finally:
            end([process for process in started if process.pid not in before])
            patch.undo()
            shutil.rmtree(folder, ignore_errors=True)


def patiently(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Ask again, for START_SECONDS, while the answer is a RuntimeError."""

    def answer(*args: Any) -> Any:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return ask(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise

    return answer


def descendants(pid: int) -> list[psutil.Process]:
    """A process and what it started, directly or not, as far as it still runs."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill those that are left; psutil makes sure that they are the same processes."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)
