"""Entry point ``vllm.general_plugins``: everything we change in vLLM, in one place.

vLLM calls ``register`` in every process (front end, engine core, workers) and before it builds its
command-line parser. Until a configuration asks for Medusa, all that happens is that functions
are wrapped by ones that look at the options and call the original. Each seam is listed with its
reason in ``patches/``, and compared with the installed vLLM before the first use.
"""

import functools
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_medusa.manifest import check_seams, is_supported
from vllm_medusa.options import options_from_engine_args

_MARK = "_vllm_medusa"


def register() -> None:
    """Wrap vLLM's seams; calling it again changes nothing."""
    if hasattr(EngineArgs.create_speculative_config, _MARK):
        return
    _wrap_create_speculative_config()
    # In a release that was never tested only this one is wrapped: it says so when Medusa is asked
    # for, and nothing else can go wrong.
    if not is_supported(vllm.__version__):
        return
    _wrap_add_cli_args()
    _wrap_create_engine_config()
    _wrap_validate_spec_decode()
    _wrap_structured_outputs()
    _wrap_update_draft_token_ids()
    _wrap_metrics()


def _mark(wrapper: Any) -> Any:
    setattr(wrapper, _MARK, True)
    return wrapper


def _wrap_add_cli_args() -> None:
    """Add ``--speculative-model``, another name of ``--spec-model``, to vLLM's parser."""
    original = EngineArgs.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        parser.add_argument(
            "--speculative-model",
            dest="spec_model",
            default=None,
            metavar="medusa:HEADS",
            help="Serve with Medusa heads and tree verification: a folder or a hub id of heads, "
            "with @REVISION if wanted. --spec-tokens sets the number of tree nodes.",
        )
        return parser

    EngineArgs.add_cli_args = staticmethod(_mark(add_cli_args))


def _wrap_create_speculative_config() -> None:
    """Build our config where the options ask for Medusa."""
    original = EngineArgs.create_speculative_config

    @functools.wraps(original)
    def create_speculative_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        options = options_from_engine_args(self)
        if options is None:
            return original(self, *args, **kwargs)
        check_seams()
        from vllm_medusa.config import speculative_config_from_options

        return speculative_config_from_options(options, *args, **kwargs)

    EngineArgs.create_speculative_config = _mark(create_speculative_config)


def _wrap_create_engine_config() -> None:
    """Refuse what is not supported once the whole configuration is known; choose our worker."""
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        # Ours is the only speculative config with a token tree. Asked by name, so that a process
        # that does not use Medusa imports nothing of it.
        if hasattr(config.speculative_config, "token_tree"):
            from vllm_medusa.support import check_supported, choose_worker

            check_supported(config)
            choose_worker(config)
        return config

    EngineArgs.create_engine_config = _mark(create_engine_config)


def _wrap_validate_spec_decode() -> None:
    """Let requests use min-p and logit bias, which vLLM refuses with speculation of its own."""
    original = SamplingParams._validate_spec_decode

    @functools.wraps(original)
    def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
        if not hasattr(speculative_config, "token_tree"):
            original(self, speculative_config)

    SamplingParams._validate_spec_decode = _mark(_validate_spec_decode)


def _wrap_structured_outputs() -> None:
    """Let grammars follow the paths of a tree; vLLM takes a request's drafts for a chain."""
    from vllm.v1.structured_output import StructuredOutputManager

    stock_validate = StructuredOutputManager.validate_tokens
    stock_bitmask = StructuredOutputManager.grammar_bitmask
    stock_accept = StructuredOutputManager.accept_tokens

    # The first and the last are called for all requests, also for those without a grammar.
    @functools.wraps(stock_validate)
    def validate_tokens(self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        config = self.vllm_config.speculative_config
        if not (request.use_structured_output and hasattr(config, "token_tree")):
            return stock_validate(self, request, spec_tokens)
        from vllm_medusa.grammar import valid_drafts

        return valid_drafts(self, request, spec_tokens, config.token_tree)

    @functools.wraps(stock_bitmask)
    def grammar_bitmask(self: Any, requests: Any, request_ids: Any, scheduled: Any) -> Any:
        config = self.vllm_config.speculative_config
        if not hasattr(config, "token_tree"):
            return stock_bitmask(self, requests, request_ids, scheduled)
        from vllm_medusa.grammar import tree_bitmask

        return tree_bitmask(self, requests, request_ids, scheduled, config.token_tree)

    @functools.wraps(stock_accept)
    def accept_tokens(self: Any, request: Any, new_token_ids: list[int]) -> bool:
        config = self.vllm_config.speculative_config
        if not (request.use_structured_output and hasattr(config, "token_tree")):
            return stock_accept(self, request, new_token_ids)
        from vllm_medusa.grammar import accept_one_by_one

        return accept_one_by_one(stock_accept, self, request, new_token_ids)

    StructuredOutputManager.validate_tokens = _mark(validate_tokens)
    StructuredOutputManager.grammar_bitmask = _mark(grammar_bitmask)
    StructuredOutputManager.accept_tokens = _mark(accept_tokens)


def _wrap_update_draft_token_ids() -> None:
    """Note with the requests of which of them the drafts form a chain, where the runner says so."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_draft_token_ids

    @functools.wraps(original)
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        if hasattr(draft_token_ids, "are_chain"):  # ours (drafts.py)
            draft_token_ids.note(self.requests)
        original(self, draft_token_ids)

    Scheduler.update_draft_token_ids = _mark(update_draft_token_ids)


def _wrap_metrics() -> None:
    """Count the requests that are served without trees."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    stock_init, stock_process = PrometheusStatLogger.__init__, InputProcessor.process_inputs

    @functools.wraps(stock_init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, vllm_config, *args, **kwargs)
        if hasattr(vllm_config.speculative_config, "token_tree"):
            from vllm_medusa.metrics import add_metrics

            add_metrics(self)

    @functools.wraps(stock_process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock_process(self, *args, **kwargs)
        if hasattr(self.vllm_config.speculative_config, "token_tree"):
            from vllm_medusa.metrics import count_request

            count_request(request.sampling_params)
        return request

    PrometheusStatLogger.__init__ = _mark(__init__)
    InputProcessor.process_inputs = _mark(process_inputs)
