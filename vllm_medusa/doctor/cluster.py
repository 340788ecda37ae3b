"""The nodes of a Ray cluster: the plugin has to be on every one of them.

Says nothing where Ray is not installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from vllm_medusa.cpu_setup import distribution_version
from vllm_medusa.doctor import ray_nodes
from vllm_medusa.doctor.findings import ERROR, WARNING, Finding

SECTION = "Ray"
SECONDS = 40


def cluster_findings(timeout: float = SECONDS) -> Iterator[Finding]:
    """Whether a cluster is up, and what is installed on its nodes.

    Args:
        timeout: seconds after which a cluster that does not answer is given up.
    """
    version = distribution_version("ray")
    if version is None:
        return
    yield Finding(SECTION, "Ray", version)
    command = [sys.executable, "-m", ray_nodes.__name__]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        found = f"a cluster was found, but does not answer within {timeout:.0f} s"
        yield Finding(SECTION, "cluster", found, WARNING, "ray status")
        return
    lines = [line for line in result.stdout.splitlines() if line.startswith(ray_nodes.MARK)]
    if not lines:
        found = (result.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding(SECTION, "cluster", f"cannot be asked: {found}", WARNING, "ray status")
        return
    nodes = json.loads(lines[-1].removeprefix(ray_nodes.MARK))
    if nodes is None:
        yield Finding(SECTION, "cluster", "none is up (or RAY_ADDRESS does not lead to one)")
        return
    yield from node_findings(nodes, ray_nodes.installed())


def node_findings(
    nodes: list[dict[str, str | None]], here: dict[str, str | None]
) -> Iterator[Finding]:
    """Compare the nodes with this machine.

    Args:
        nodes: ``ray_nodes.installed()`` of each, with its ``node``.
        here: the same of this machine.
    """
    for node in nodes:
        name = f"node {node['node']}"
        if "error" in node:
            found = f"cannot be asked: {node['error']}"
            yield Finding(SECTION, name, found, ERROR, "ray status")
            continue
        missing = [package for package, version in here.items() if version and not node[package]]
        different = [
            f"{package} {node[package]}, here {version}"
            for package, version in here.items()
            if version and node[package] and node[package] != version
        ]
        if missing or different:
            found = "; ".join([*(f"{package} is not installed" for package in missing), *different])
            packages = [
                f"{package}=={version}"
                for package, version in here.items()
                if version and node[package] != version and package != "Python"
            ]
            remedy = f"pip install {' '.join(packages)}" if packages else f"Python {here['Python']}"
            yield Finding(SECTION, name, found, ERROR, f"{remedy}   # on {node['node']}")
        else:
            versions = ", ".join(f"{package} {node[package]}" for package in here if node[package])
            yield Finding(SECTION, name, versions)
