"""Looking at the nodes of a Ray cluster before workers start there.

A worker that cannot start says so with a traceback out of Ray's deserialiser or from the middle of
vLLM, and only after the target was loaded. So each node is asked first, by a small task.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vllm_medusa import __version__
from vllm_medusa.cluster.report import NodeReport, node_report

# A fresh Ray process imports torch and vLLM for it, from a slow disk perhaps, and may have to fetch
# the heads from the hub.
ANSWER_SECONDS = 300


class Node(NamedTuple):
    """A node of the cluster."""

    id: str
    """Ray's id of the node, as ``ray list nodes`` shows it."""
    address: str
    """Its IP address in the cluster."""

    def __str__(self) -> str:
        return f"node {self.address} (Ray node id {self.id})"


class ClusterError(RuntimeError):
    """Nodes of the cluster lack what workers need; names each node and what to do there."""


def check_nodes(nodes: Iterable[Node], heads: str, revision: str | None) -> None:
    """Make sure that workers can start on these nodes, and that they are all alike.

    Args:
        nodes: where workers will run.
        heads: folder or hub id of the heads; a folder must be there on every node.
        revision: of the hub id.

    Raises:
        ClusterError: a node has no plugin, another version of it or of vLLM, no heads, or other
            heads than this machine; or it did not answer.
    """
    task = ray.remote(_task())
    answers = {
        node: task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(heads, revision)
        for node in nodes
    }
    here = node_report(heads, revision)
    problems = [
        f"{node}: {problem}"
        for node, answer in answers.items()
        for problem in _problems(_wait_for(answer), here)
    ]
    if problems:
        raise ClusterError(
            "medusa cannot start on this Ray cluster:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _task() -> Callable[[str, str | None], tuple[Any, ...] | str]:
    """The task. A function in a function, because Ray sends such a one whole and others by name,
    and the node may not have this module."""

    def report(heads: str, revision: str | None) -> tuple[Any, ...] | str:
        try:
            from vllm_medusa.cluster.report import node_report
        except ImportError as error:
            return str(error)
        # A plain tuple: how NodeReport looks depends on the version that is installed.
        return tuple(node_report(heads, revision))

    return report


def _wait_for(answer: Any) -> NodeReport | str:
    """A node's report, or why there is none."""
    try:
        found = ray.get(answer, timeout=ANSWER_SECONDS)
    except GetTimeoutError:
        return f"no answer within {ANSWER_SECONDS} s: see `ray status` and the node's load"
    except RayError as error:
        return f"it could not be asked ({' '.join(str(error).split())[-400:]})"
    if isinstance(found, str):
        return (
            f"vllm-medusa is not installed, or not this version ({found}). On that node: "
            f"pip install vllm-medusa=={__version__}"
        )
    return NodeReport(*found)


def _problems(there: NodeReport | str, here: NodeReport) -> Iterator[str]:
    if isinstance(there, str):
        yield there
        return
    if there.plugin != here.plugin:
        yield (
            f"vllm-medusa {there.plugin} is installed, here {here.plugin}. On that node: "
            f"pip install vllm-medusa=={here.plugin}"
        )
    if there.vllm != here.vllm:
        yield f"vLLM {there.vllm} is installed, here {here.vllm}: install the same on all nodes"
    elif there.vllm_problem:
        yield there.vllm_problem
    copy = "Copy the heads to the same path on every node, or give a hub id that every node can get"
    if there.heads_problem:
        yield f"{there.heads_problem} {copy}"
    elif there.heads != here.heads and not here.heads_problem:
        names = sorted(
            name
            for name in there.heads | here.heads
            if there.heads.get(name) != here.heads.get(name)
        )
        yield f"the heads differ from those on this machine in {', '.join(names)}. {copy}"
