"""Entry point ``vllm.general_plugins``: everything we change in vLLM, in one place.

vLLM calls ``register`` in every process (front end, engine core, workers) and before it builds its
command-line parser. Until a configuration asks for Medusa, all that happens is that functions
are wrapped by ones that look at the options and call the original. Each seam is listed with its
reason in ``patches/``, and compared with the installed vLLM before the first use. Which releases
and runners are then served is said in one place, ``support.SERVED``.

A module is wrapped when it has been imported, whoever does it: a process that never builds engine
arguments, such as a worker, should not import what builds them because of us.
"""

import functools
from typing import Any

from vllm_medusa.after_import import after_import
from vllm_medusa.manifest import check_seams, installed_release, is_supported
from vllm_medusa.options import options_from_engine_args


@functools.cache
def register() -> None:
    """Wrap vLLM's seams; calling it again changes nothing."""
    after_import("vllm.engine.arg_utils", _wrap_engine_args)
    # In a release that was never tested only create_speculative_config is wrapped: it says so when
    # Medusa is asked for, and nothing else can go wrong.
    if is_supported(installed_release()):
        after_import("vllm.sampling_params", _wrap_validate_spec_decode)
        after_import("vllm.config.vllm", _wrap_vllm_config)
        after_import("vllm.v1.structured_output", _wrap_structured_outputs)
        after_import("vllm.v1.core.sched.scheduler", _wrap_update_draft_token_ids)
        after_import("vllm.v1.engine.input_processor", _wrap_input_processor)
        after_import("vllm.v1.metrics.loggers", _wrap_loggers)


def _wrap_engine_args() -> None:
    _wrap_create_speculative_config()
    if is_supported(installed_release()):
        _wrap_add_cli_args()
        _wrap_create_engine_config()


def _wrap_vllm_config() -> None:
    _wrap_unsupported_features()
    _wrap_scheduling()


def _is_ours(speculative_config: Any) -> bool:
    """Whether Medusa is on: ours is the only speculative config with a token tree.

    Asked by name, so that a process that does not use Medusa imports nothing of it.
    """
    return hasattr(speculative_config, "token_tree")


def _wrap_add_cli_args() -> None:
    """Add ``--speculative-model``, another name of ``--spec-model``, to vLLM's parser; and our
    method to those of ``--spec-method``, where 0.33 has no Medusa."""
    from vllm.engine.arg_utils import EngineArgs

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
        methods = next(action for action in parser._actions if action.dest == "spec_method")
        if methods.choices is not None and "medusa" not in methods.choices:
            methods.choices = [*methods.choices, "medusa"]
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _wrap_create_speculative_config() -> None:
    """Build our config where the options ask for Medusa."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config

    @functools.wraps(original)
    def create_speculative_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        options = options_from_engine_args(self)
        if options is None:
            return original(self, *args, **kwargs)
        check_seams()
        from vllm_medusa.config import speculative_config_from_options

        return speculative_config_from_options(options, *args, **kwargs)

    EngineArgs.create_speculative_config = create_speculative_config


def _wrap_create_engine_config() -> None:
    """Refuse what is not supported once the whole configuration is known; choose our classes."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if _is_ours(config.speculative_config):
            from vllm_medusa.support import check_supported, choose_executor, choose_worker

            check_supported(config)
            choose_worker(config)
            choose_executor(config)
        return config

    EngineArgs.create_engine_config = create_engine_config


def _wrap_validate_spec_decode() -> None:
    """Let requests use min-p and logit bias, which vLLM refuses with speculation of its own."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode

    @functools.wraps(original)
    def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
        if not _is_ours(speculative_config):
            original(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode


def _wrap_unsupported_features() -> None:
    """Let vLLM choose its V2 runner, of which 0.32 says that it has no Medusa."""
    from vllm.config.vllm import VllmConfig  # the package may still be on its way

    original = VllmConfig._get_v2_model_runner_unsupported_features

    @functools.wraps(original)
    def _get_v2_model_runner_unsupported_features(self: VllmConfig) -> list[str]:
        features = original(self)
        if _is_ours(self.speculative_config):
            features = [feature for feature in features if "'medusa'" not in feature]
        return features

    VllmConfig._get_v2_model_runner_unsupported_features = _get_v2_model_runner_unsupported_features


def _wrap_scheduling() -> None:
    """Let requests be scheduled ahead of the device on the V2 runner.

    vLLM knows by name which speculation can be, refuses it to others or turns it off. The whole
    configuration may be built anew from a finished one, so this is settled wherever it is built.
    """
    from vllm.config.vllm import VllmConfig

    original = VllmConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if not _is_ours(self.speculative_config):
            original(self)
            return
        from vllm_medusa.support import choose_scheduling

        asked = self.scheduler_config.async_scheduling
        self.scheduler_config.async_scheduling = False
        original(self)
        choose_scheduling(self, asked)

    VllmConfig.__post_init__ = __post_init__


def _wrap_structured_outputs() -> None:
    """Let grammars follow the paths of a tree; vLLM takes a request's drafts for a chain."""
    from vllm.v1.structured_output import StructuredOutputManager

    stock_validate = StructuredOutputManager.validate_tokens
    stock_bitmask = StructuredOutputManager.grammar_bitmask
    stock_accept = StructuredOutputManager.accept_tokens

    # The first and the last are called for all requests, also for those without a grammar.
    @functools.wraps(stock_validate)
    def validate_tokens(self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        if not (request.use_structured_output and _is_ours(self.vllm_config.speculative_config)):
            return stock_validate(self, request, spec_tokens)
        from vllm_medusa.grammar import valid_drafts

        tree = self.vllm_config.speculative_config.token_tree
        return valid_drafts(self, request, spec_tokens, tree)

    @functools.wraps(stock_bitmask)
    def grammar_bitmask(self: Any, requests: Any, request_ids: Any, *args: Any) -> Any:
        if not _is_ours(self.vllm_config.speculative_config):
            return stock_bitmask(self, requests, request_ids, *args)
        from vllm_medusa.grammar import bitmask_width, tree_bitmask

        (scheduled,) = args
        tree = self.vllm_config.speculative_config.token_tree
        width = bitmask_width(self.vllm_config)
        return tree_bitmask(self, requests, request_ids, scheduled, tree, width)

    @functools.wraps(stock_accept)
    def accept_tokens(self: Any, request: Any, new_token_ids: list[int]) -> bool:
        if not (request.use_structured_output and _is_ours(self.vllm_config.speculative_config)):
            return stock_accept(self, request, new_token_ids)
        from vllm_medusa.grammar import accept_one_by_one

        return accept_one_by_one(stock_accept, self, request, new_token_ids)

    StructuredOutputManager.validate_tokens = validate_tokens
    StructuredOutputManager.grammar_bitmask = grammar_bitmask
    StructuredOutputManager.accept_tokens = accept_tokens


def _wrap_update_draft_token_ids() -> None:
    """Note with the requests of which of them the drafts form a chain, where the runner says so."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_draft_token_ids

    @functools.wraps(original)
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        if hasattr(draft_token_ids, "are_chain"):  # ours (drafts.py)
            draft_token_ids.note(self.requests)
        original(self, draft_token_ids)

    Scheduler.update_draft_token_ids = update_draft_token_ids


def _wrap_loggers() -> None:
    """Export the number of requests that are served without trees."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    original = PrometheusStatLogger.__init__

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if _is_ours(vllm_config.speculative_config):
            from vllm_medusa.metrics import add_metrics

            add_metrics(self)

    PrometheusStatLogger.__init__ = __init__


def _wrap_input_processor() -> None:
    """Count the requests that are served without trees."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        if _is_ours(self.vllm_config.speculative_config):
            from vllm_medusa.metrics import count_request

            count_request(request.sampling_params, self.vllm_config)
        return request

    InputProcessor.process_inputs = process_inputs
