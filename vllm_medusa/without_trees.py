"""Which requests are served without trees, and why."""

from vllm.sampling_params import SamplingParams

# Holds state that follows the text, not a tree.
THINKING_BUDGET = "thinking_budget"

REASONS = (THINKING_BUDGET,)


def reason_without_trees(params: SamplingParams) -> str | None:
    """Why a request is served without trees, one of ``REASONS``; None if it gets them."""
    if params.thinking_token_budget is not None:
        return THINKING_BUDGET
    return None
