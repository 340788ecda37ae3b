"""Which requests are served without trees, and why."""

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

# Holds state that follows the text, not a tree; the V2 runner can follow a path with it.
THINKING_BUDGET = "thinking_budget"

REASONS = (THINKING_BUDGET,)


def reason_without_trees(params: SamplingParams, config: VllmConfig) -> str | None:
    """Why a request is served without trees, one of ``REASONS``; None if it gets them."""
    if params.thinking_token_budget is not None and not config.use_v2_model_runner:
        return THINKING_BUDGET
    return None
