"""Entry point ``vllm.general_plugins``: everything we change in vLLM, in one place.

vLLM calls ``register`` in every process (front end, engine core, workers) and before it builds its
command-line parser. Until a configuration asks for Medusa, all that happens is that five functions
are wrapped by ones that look at the options and call the original. Each seam is listed with its
reason in ``patches/``, and compared with the installed vLLM before the first use.

A module is wrapped when it has been imported, whoever does it: a process that never builds engine
arguments, such as a worker, should not import what builds them because of us.
"""

import functools
from typing import Any

import vllm

from vllm_medusa.after_import import after_import
from vllm_medusa.manifest import check_seams, is_supported
from vllm_medusa.options import options_from_engine_args

_MARK = "_vllm_medusa"


@functools.cache
def register() -> None:
    """Wrap vLLM's seams; calling it again changes nothing."""
    after_import("vllm.engine.arg_utils", _wrap_engine_args)
    # In a release that was never tested only create_speculative_config is wrapped: it says so when
    # Medusa is asked for, and nothing else can go wrong.
    if is_supported(vllm.__version__):
        after_import("vllm.sampling_params", _wrap_validate_spec_decode)
        after_import("vllm.config.vllm", _wrap_unsupported_features)


def _wrap_engine_args() -> None:
    _wrap_create_speculative_config()
    if is_supported(vllm.__version__):
        _wrap_add_cli_args()
        _wrap_create_engine_config()


def _mark(wrapper: Any) -> Any:
    setattr(wrapper, _MARK, True)
    return wrapper


def _wrap_add_cli_args() -> None:
    """Add ``--speculative-model``, another name of ``--spec-model``, to vLLM's parser."""
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
        return parser

    EngineArgs.add_cli_args = staticmethod(_mark(add_cli_args))


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

    EngineArgs.create_speculative_config = _mark(create_speculative_config)


def _wrap_create_engine_config() -> None:
    """Refuse what is not supported once the whole configuration is known; choose our worker."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if options_from_engine_args(self) is None:
            return original(self, *args, **kwargs)
        # vLLM knows by name which methods can be scheduled ahead, and refuses others or turns it
        # off. Ours can on the V2 runner, so it is left open here and settled below.
        asked, self.async_scheduling = self.async_scheduling, None
        try:
            config = original(self, *args, **kwargs)
        finally:
            self.async_scheduling = asked
        from vllm_medusa.support import check_supported, choose_scheduling, choose_worker

        choose_scheduling(config, asked)
        check_supported(config)
        choose_worker(config)
        return config

    EngineArgs.create_engine_config = _mark(create_engine_config)


def _wrap_validate_spec_decode() -> None:
    """Let requests use min-p and logit bias, which vLLM refuses with speculation of its own."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode

    @functools.wraps(original)
    def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
        if not hasattr(speculative_config, "token_tree"):
            original(self, speculative_config)

    SamplingParams._validate_spec_decode = _mark(_validate_spec_decode)


def _wrap_unsupported_features() -> None:
    """Let vLLM choose its V2 runner, of which it says that it has no Medusa."""
    from vllm.config.vllm import VllmConfig  # the package may still be on its way

    original = VllmConfig._get_v2_model_runner_unsupported_features

    @functools.wraps(original)
    def _get_v2_model_runner_unsupported_features(self: VllmConfig) -> list[str]:
        features = original(self)
        if hasattr(self.speculative_config, "token_tree"):
            features = [feature for feature in features if "'medusa'" not in feature]
        return features

    VllmConfig._get_v2_model_runner_unsupported_features = _mark(
        _get_v2_model_runner_unsupported_features
    )
