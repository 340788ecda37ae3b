"""What the runner tells the engine core about drafts besides their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """vLLM's ``DraftTokenIds``, and of which requests they form a chain from the request's own text
    (``lookup.py``); the others' form the heads' tree.

    The engine core must know the parents of drafts to follow a grammar along them.
    """

    are_chain: list[bool]
    """[requests]"""

    def note(self, requests: Mapping[str, Request]) -> None:
        """Remember it with the requests, until their next drafts."""
        for name, is_chain in zip(self.req_ids, self.are_chain, strict=True):
            if name in requests:
                requests[name].medusa_drafts_are_chain = is_chain


def drafts_are_chain(request: Request) -> bool:
    """Whether a request's newest drafts form a chain, as the runner said."""
    return getattr(request, "medusa_drafts_are_chain", False)
