"""One metric beside vLLM's own: requests that are served without trees, by reason.

Why a request gets no trees follows from its parameters and the model runner (``without_trees.py``),
so the front end counts, where vLLM's metrics live: the engine core and the workers are other
processes, and what they send to the front end has no room for numbers of ours.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.loggers import PrometheusStatLogger

from vllm_medusa.without_trees import REASONS, reason_without_trees

NAME = "vllm:medusa_requests_without_trees"

# Counters by reason. Like vLLM's own metrics they are those of the newest engine in this process.
_counters: dict[str, Any] = {}


def add_metrics(stat_logger: PrometheusStatLogger) -> None:
    """Register the counters beside those of a new engine; all reasons start at 0."""
    counter = stat_logger._counter_cls(
        name=NAME,
        documentation="Number of requests that Medusa serves without trees, by reason.",
        labelnames=["model_name", "reason"],
    )
    model = stat_logger.vllm_config.model_config.served_model_name
    for reason in REASONS:
        _counters[reason] = counter.labels(model, reason)


def count_request(params: SamplingParams, config: VllmConfig) -> None:
    """Count a request that was let in, each of its ``n`` answers as one, as vLLM counts them."""
    reason = reason_without_trees(params, config)
    if reason in _counters:  # not where the engine keeps no metrics
        _counters[reason].inc(params.n)
