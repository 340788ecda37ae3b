"""Structured outputs on trees: the grammar follows every path.

vLLM takes a request's drafts for a chain: it feeds them to the grammar one behind the other. In a
tree each row has the grammar's state behind its own path. One walk, depth first and with the
grammar rolled back on the way up, gives both things that the engine core asks for: which drafts are
worth a row, and what the target may say at each row. They stand in the place of methods of
vLLM's ``StructuredOutputManager``, and use its backends (xgrammar, guidance, outlines) as they are.

A draft that breaks the grammar is never accepted, because its parent's row is masked. Right output
therefore needs right masks only.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_medusa.drafts import drafts_are_chain
from vllm_medusa.tree import TokenTree


def valid_drafts(
    manager: StructuredOutputManager, request: Request, drafts: list[int], tree: TokenTree
) -> list[int]:
    """The drafts up to the last one that the grammar allows behind its path.

    Only the end of the list can be taken off: what is left is a tree again, and the runner, which
    sees no more than how many drafts were scheduled, knows it. So a bad draft in front of a good
    one keeps its row. Trees list their best nodes first, and long paths last: most bad ones go.

    Args:
        manager: vLLM's manager of grammars.
        request: a request with a grammar.
        drafts: tokens of the first nodes of the heads' tree, or of a chain (``drafts.py``).
        tree: the heads' tree.
    """
    rows = [row for row, _ in _rows(manager, request, drafts, tree)]
    return drafts[: max(rows)]


def tree_bitmask(
    manager: StructuredOutputManager,
    requests: Mapping[str, Request],
    request_ids: Sequence[str],
    scheduled: Mapping[str, list[int]],
    tree: TokenTree,
    width: int | None = None,
) -> NDArray[np.int32] | None:
    """Which tokens may come next at every row.

    Args:
        manager: vLLM's manager of grammars.
        requests: all requests by name.
        request_ids: those with a grammar that sample in this step.
        scheduled: their drafts, where they have any.
        tree: the heads' tree.
        width: rows for every request, used or not; None: as many as it has.

    Returns:
        int32 [rows of these requests, vocabulary / 32], one bit a token; a request has as many rows
        as ``width`` says, of which the first are its root and its drafts. None without requests.
        All tokens may come where the grammar has ended and at rows that are never reached; where
        it has not begun (a model that is thinking), all but those of ``_no_ends_of_thinking``.
    """
    if not request_ids:
        return None
    drafts_of = [scheduled.get(name, []) for name in request_ids]
    num_rows = [width or 1 + len(drafts) for drafts in drafts_of]
    bitmask = manager.backend.allocate_token_bitmask(sum(num_rows)).fill_(-1)
    first = 0
    for name, drafts, size in zip(request_ids, drafts_of, num_rows, strict=True):
        request = requests[name]
        for row, stage in _rows(manager, request, drafts, tree):
            if stage is Stage.CONSTRAINED:
                request.structured_output_request.grammar.fill_bitmask(bitmask, first + row)
            elif stage is Stage.THINKING:
                _take_out(bitmask[first + row].numpy(), _no_ends_of_thinking(manager, request))
        first += size
    return bitmask.numpy()


def bitmask_width(config: VllmConfig) -> int | None:
    """How many rows of the bitmask a request has, used or not; None: as many as it needs."""
    if not config.use_v2_model_runner:
        return None
    from vllm.v1.worker.gpu import structured_outputs

    # The runner of 0.32 is told row by row where a mask belongs; that of 0.33 counts.
    is_told = hasattr(structured_outputs, "_build_grammar_mapping")
    return None if is_told else 1 + config.speculative_config.num_speculative_tokens


def accept_one_by_one(
    stock_accept: Callable[[StructuredOutputManager, Request, list[int]], bool],
    manager: StructuredOutputManager,
    request: Request,
    new_tokens: list[int],
) -> bool:
    """Lead the grammar along what a step has added to the text, for good.

    Token by token where the grammar has begun: guidance reads no list that goes on behind the end
    of the text, as one step's tokens may with ``ignore_eos``.

    Args:
        stock_accept: vLLM's own way.
        manager: vLLM's manager of grammars.
        request: a request with a grammar.
        new_tokens: what was added.

    Returns:
        Whether the grammar allows them all.
    """
    if not _has_begun(manager, request):
        return stock_accept(manager, request, new_tokens)
    return all(stock_accept(manager, request, [token]) for token in new_tokens)


def _has_begun(manager: StructuredOutputManager, request: Request) -> bool:
    """Whether the next token is the grammar's business; not while a model is thinking."""
    return manager._get_constraint_bounds(request, ()).constraint_start == 0


def _no_ends_of_thinking(manager: StructuredOutputManager, request: Request) -> Sequence[int]:
    """Tokens that would end the thinking and begin the output, as which the grammar refuses them;
    known to vLLM since 0.33."""
    find = getattr(manager, "_masked_reasoning_ends", None)
    return () if find is None else find(request)


def _take_out(row: NDArray[np.int32], tokens: Sequence[int]) -> None:
    """Forbid tokens in a row of a bitmask, [vocabulary / 32]."""
    for token in tokens:
        row.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)


class Stage(Enum):
    """Where the text behind a path is: before, in, or behind what the grammar describes."""

    THINKING = "thinking"
    CONSTRAINED = "constrained"
    ENDED = "ended"


def _rows(
    manager: StructuredOutputManager, request: Request, drafts: list[int], tree: TokenTree
) -> Iterator[tuple[int, Stage]]:
    """Visit the root and all drafts whose path the grammar allows, parents first.

    Yields the row and the stage in which the text behind it is. While a row is out, the
    grammar is in the state behind its path; once all were taken, it is where it was before.
    """
    grammar = request.structured_output_request.grammar
    children = _chain_rows(len(drafts)) if drafts_are_chain(request) else _child_rows(tree)
    # vLLM marks drafts that it could not fill with -1; nothing stands behind them.
    drafts = strip_speculative_padding(drafts)

    def visit(row: int, path: list[int], has_begun: bool) -> Iterator[tuple[int, Stage]]:
        if has_begun and grammar.is_terminated():
            yield row, Stage.ENDED
            return
        yield row, Stage.CONSTRAINED if has_begun else Stage.THINKING
        for child in children[row]:
            if child > len(drafts):
                return
            longer = [*path, drafts[child - 1]]
            begins = has_begun
            read = longer[-1:]  # what the grammar reads of the path here
            if not has_begun:
                # Still thinking: vLLM's parser says from where on the path is structured output.
                bounds = manager._get_constraint_bounds(request, longer)
                begins = bounds.constraint_start <= len(longer)
                read = longer[bounds.grammar_start :]
            # A grammar that is handed a wrong token may be of no use afterwards: asked first.
            if read and grammar.validate_tokens(read) != read:
                continue
            if read and not grammar.accept_tokens(request.request_id, read):
                continue
            yield from visit(child, longer, begins)
            if read:
                grammar.rollback(len(read))

    yield from visit(0, [], _has_begun(manager, request))


@functools.lru_cache
def _child_rows(tree: TokenTree) -> list[list[int]]:
    """The rows of each row's children, in order."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parent_rows()):
        children[parent].append(node + 1)
    return children


def _chain_rows(length: int) -> list[list[int]]:
    """The same for a chain."""
    return [[row] for row in range(1, length + 1)] + [[]]
