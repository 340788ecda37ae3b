"""Entry point ``vllm.general_plugins``: everything we change in vLLM, in one place.

vLLM calls ``register`` in every process (front end, engine core, workers) and before it builds its
command-line parser. Until a configuration asks for Medusa, all that happens is that six functions
are wrapped by ones that look at the options and call the original. Each seam is listed with its
reason in ``patches/``, and compared with the installed vLLM before the first use. Which releases
and runners are then served is said in one place, ``support.SERVED``.
"""

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_medusa.manifest import check_seams, installed_release, is_supported
from vllm_medusa.options import options_from_engine_args

_MARK = "_vllm_medusa"


def register() -> None:
    """Wrap vLLM's seams; calling it again changes nothing."""
    if hasattr(EngineArgs.create_speculative_config, _MARK):
        return
    _wrap_create_speculative_config()
    # In a release that was never tested only this one is wrapped: it says so when Medusa is asked
    # for, and nothing else can go wrong.
    if not is_supported(installed_release()):
        return
    _wrap_add_cli_args()
    _wrap_create_engine_config()
    _wrap_validate_spec_decode()
    _wrap_unsupported_features()
    _wrap_scheduling()


def _mark(wrapper: Any) -> Any:
    setattr(wrapper, _MARK, True)
    return wrapper


def _wrap_add_cli_args() -> None:
    """Add ``--speculative-model``, another name of ``--spec-model``, to vLLM's parser; and our
    method to those of ``--spec-method``, where 0.33 has no Medusa."""
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


def _wrap_unsupported_features() -> None:
    """Let vLLM choose its V2 runner, of which 0.32 says that it has no Medusa."""
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


def _wrap_scheduling() -> None:
    """Let requests be scheduled ahead of the device on the V2 runner.

    vLLM knows by name which speculation can be, refuses it to others or turns it off. The whole
    configuration may be built anew from a finished one, so this is settled wherever it is built.
    """
    original = VllmConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: VllmConfig) -> None:
        if not hasattr(self.speculative_config, "token_tree"):
            original(self)
            return
        from vllm_medusa.support import choose_scheduling

        asked = self.scheduler_config.async_scheduling
        self.scheduler_config.async_scheduling = False
        original(self)
        choose_scheduling(self, asked)

    VllmConfig.__post_init__ = _mark(__post_init__)
