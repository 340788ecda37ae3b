"""Token trees: which guesses are verified together, and in which order.

A tree is a list of nodes without the root. Node ``i`` has a parent, a depth (1 = child of the root)
and a rank (its token is the rank-th best of head ``depth``). The list is *nested*: parents stand
before their children, so that every prefix of it is a tree too. vLLM may schedule fewer nodes than
were drafted (token budget, ``max_model_len``, batch-size schedule); what it keeps is then a smaller
tree, and nothing needs a special case.

In a verification step a request owns rows: row 0 is the root, row ``i + 1`` is node ``i``.
"""

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# One bit of a 128-bit mask per row: the root and 127 nodes. vLLM's own limit on speculative tokens
# is 128 (vllm/v1/sample/rejection_sampler.py, MAX_SPEC_LEN).
MAX_NODES = 127
MAX_ROWS = MAX_NODES + 1

TREE_FILE = "medusa_tree.json"

# What untuned heads are assumed to reach: the chance that the token of a rank is right, given that
# the path to it is. The values decay like those measured for small heads on chat; a tree calibrated
# for the heads at hand replaces them.
_DEFAULT_TOP1 = 0.5
_DEFAULT_HEAD_DECAY = 0.85
_DEFAULT_RANK_DECAY = 0.4


class TreeError(ValueError):
    """A tree that cannot be used; the message says what was found and what was expected."""


@dataclass(frozen=True)
class TokenTree:
    """Topology of a token tree; holds no token ids.

    ``paths[i]`` lists the ranks from the root to node ``i``, in the notation of the original Medusa
    (arXiv 2401.10774): ``(0, 2)`` is the third-best token of head 2 below the best token of head 1.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """Build a tree from rank paths in any order.

        The given order is kept except that a parent is moved in front of its first child.

        Raises:
            TreeError: empty, too many nodes, an entry that is no list of ranks, a repeated node, or
                a node whose parent is missing.
        """
        if not isinstance(paths, list | tuple) or not paths:
            raise TreeError(
                "a tree is a non-empty list of rank paths such as [[0], [1], [0, 0]]; "
                f"found {paths!r}"
            )
        nodes: list[tuple[int, ...]] = []
        for path in paths:
            if (
                not isinstance(path, list | tuple)
                or not path
                or not all(type(rank) is int and rank >= 0 for rank in path)
            ):
                raise TreeError(
                    f"tree node {path!r} is not a path: expected a non-empty list of ranks "
                    "(whole numbers from 0), one for each depth, such as [0, 2]"
                )
            nodes.append(tuple(path))
        known = set(nodes)
        repeated = sorted({node for node in nodes if nodes.count(node) > 1})
        if repeated:
            raise TreeError(f"tree repeats the nodes {_show(repeated)}: list each node once")
        missing = sorted({node[:-1] for node in nodes if len(node) > 1} - known)
        if missing:
            raise TreeError(
                f"tree misses the parents {_show(missing)}: every prefix of a path must "
                "be a node too"
            )
        if len(nodes) > MAX_NODES:
            raise TreeError(f"tree has {len(nodes)} nodes, at most {MAX_NODES} can be verified")
        nested: dict[tuple[int, ...], None] = {}
        for node in nodes:
            for depth in range(1, len(node) + 1):
                nested.setdefault(node[:depth])
        return cls(tuple(nested))

    @classmethod
    def chain(cls, length: int) -> "TokenTree":
        """The best guess of every head, each below the one before."""
        return cls.from_paths([(0,) * depth for depth in range(1, length + 1)])

    @classmethod
    def grow(cls, accuracies: Sequence[Sequence[float]], num_nodes: int) -> "TokenTree":
        """Best-first growth: always add the node whose path is most likely right.

        Args:
            accuracies: ``accuracies[k][r]``, the chance that rank ``r`` of head ``k + 1`` is right
                given that the path to it is.
            num_nodes: how many nodes to add; fewer come back if the table holds fewer paths.

        Gives for every prefix the best tree of that size under these accuracies, hence nested.
        """
        table = [*accuracies, []]
        return cls.grow_by(lambda path: table[len(path)], num_nodes)

    @classmethod
    def grow_by(
        cls, chances: Callable[[tuple[int, ...]], Sequence[float]], num_nodes: int
    ) -> "TokenTree":
        """Best-first growth where what comes next may depend on the whole path.

        Args:
            chances: ``chances(path)[r]``, the chance that rank ``r`` comes next given that ``path``
                (the root's is empty) is right; none where no head is left.
            num_nodes: how many nodes to add; fewer come back if there are no more.

        Ties go to the shallower node, then to the lower ranks, so that growth is reproducible.
        """
        chosen: list[tuple[int, ...]] = []
        frontier: list[tuple[float, int, tuple[int, ...]]] = []
        path: tuple[int, ...] = ()
        value = 1.0
        while True:
            for rank, chance in enumerate(chances(path)):
                heapq.heappush(frontier, (-value * chance, len(path) + 1, (*path, rank)))
            if not frontier or len(chosen) == num_nodes:
                return cls.from_paths(chosen)
            negated, _, path = heapq.heappop(frontier)
            value = -negated
            chosen.append(path)

    def __len__(self) -> int:
        return len(self.paths)

    def prefix(self, num_nodes: int) -> "TokenTree":
        """The tree of the first ``num_nodes`` nodes."""
        return TokenTree(self.paths[:num_nodes])

    def with_siblings_numbered(self) -> "TokenTree":
        """The same nodes in the same order, with ranks that count each node's siblings from 0."""
        number_of: dict[tuple[int, ...], int] = {}
        children: dict[tuple[int, ...], int] = {}
        for path in self.paths:
            number_of[path] = children.get(path[:-1], 0)
            children[path[:-1]] = number_of[path] + 1
        return TokenTree(
            tuple(
                tuple(number_of[path[:depth]] for depth in range(1, len(path) + 1))
                for path in self.paths
            )
        )

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(len(path) for path in self.paths)

    @property
    def num_ranks(self) -> list[int]:
        """How many ranks are needed from each head, first head first."""
        return [
            max((path[-1] + 1 for path in self.paths if len(path) == depth), default=0)
            for depth in range(1, self.depth + 1)
        ]

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self)

    def parent_rows(self) -> np.ndarray:
        """Row of each node's parent, int64 [nodes]; 0 is the root."""
        row_of = {path: row for row, path in enumerate(self.paths, start=1)}
        row_of[()] = 0
        return np.array([row_of[path[:-1]] for path in self.paths], dtype=np.int64)

    def row_depths(self) -> np.ndarray:
        """Depth of each row, int64 [1 + nodes]; the root has depth 0."""
        return np.array([0, *map(len, self.paths)], dtype=np.int64)

    def ranks(self) -> np.ndarray:
        """Rank of each node in its head's top-k, int64 [nodes]."""
        return np.array([path[-1] for path in self.paths], dtype=np.int64)

    def ancestor_mask(self) -> np.ndarray:
        """bool [rows, rows]: may row i see row j, that is, is j an ancestor of i or i itself."""
        rows = len(self) + 1
        mask = np.eye(rows, dtype=bool)
        for node, parent in enumerate(self.parent_rows()):
            mask[node + 1] |= mask[parent]
        return mask

    def check_fits(self, num_heads: int, num_tokens: int, heads: str) -> None:
        """Refuse a tree that the heads cannot fill.

        Args:
            num_heads: heads in the checkpoint.
            num_tokens: size of the draft vocabulary.
            heads: name for the message.
        """
        if self.depth > num_heads:
            deepest = next(path for path in self.paths if len(path) == self.depth)
            raise TreeError(
                f"tree has depth {self.depth} (node {list(deepest)}), but {heads} holds "
                f"{num_heads} heads: use a tree of at most that depth, or heads with more"
            )
        worst = max(self.num_ranks)
        if worst > num_tokens:
            raise TreeError(
                f"tree asks for rank {worst - 1}, but the draft vocabulary of {heads} holds "
                f"{num_tokens} tokens: ranks run from 0 to {num_tokens - 1}"
            )


def default_tree(num_heads: int, num_nodes: int) -> TokenTree:
    """The tree used where none is given or stored: best-first growth under assumed accuracies."""
    table = [
        [
            _DEFAULT_TOP1 * _DEFAULT_HEAD_DECAY**head * _DEFAULT_RANK_DECAY**rank
            for rank in range(10)
        ]
        for head in range(num_heads)
    ]
    return TokenTree.grow(table, num_nodes)


def read_tree(source: Any, num_heads: int, num_nodes: int | None = None) -> TokenTree:
    """Read the option ``tree``: a list of paths, ``"chain"``, JSON text, or a JSON file.

    Args:
        source: the option's value. A file holds the list itself or an object with the key
            ``paths``.
        num_heads: heads in the checkpoint; a chain without ``num_nodes`` uses them all.
        num_nodes: how many nodes were asked for, if any; only a chain takes its length from it.
    """
    if isinstance(source, list | tuple):
        return TokenTree.from_paths(source)
    if source == "chain":
        return TokenTree.chain(num_nodes or num_heads)
    if not isinstance(source, str | Path):
        raise TreeError(
            'tree must be a list of rank paths, "chain", or the path of a JSON file; '
            f"found {source!r}"
        )
    text, where = str(source), "the option tree"
    if not text.lstrip().startswith("["):
        path = Path(text)
        where = f"tree file {path}"
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TreeError(
                f"{where} cannot be read ({error}): give a JSON file with a list of rank paths, "
                'the list itself, or "chain"'
            ) from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TreeError(f"{where} is not valid JSON: {error}") from error
    if isinstance(data, dict):
        if "paths" not in data:
            raise TreeError(f"{where} has no key 'paths'; found the keys {sorted(data)}")
        data = data["paths"]
    try:
        return TokenTree.from_paths(data)
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from None


def stored_num_nodes(path: Path) -> int | None:
    """How many of its nodes a stored tree says to use, if it says so; the rest is there to ask for.

    0 means that trees do not pay.

    Raises:
        TreeError: it says something else than a number from 0 on.
    """
    data = json.loads(path.read_text())
    nodes = data.get("num_speculative_tokens") if isinstance(data, dict) else None
    if nodes is not None and (type(nodes) is not int or nodes < 0):
        raise TreeError(
            f"tree file {path}: num_speculative_tokens is {nodes!r}, expected a whole number "
            "from 0 on"
        )
    return nodes


def _show(nodes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join(str(list(node)) for node in nodes[:10])
    return shown + (f" and {len(nodes) - 10} more" if len(nodes) > 10 else "")
