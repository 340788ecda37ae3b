"""Whether the options ask for Medusa: read by every engine, so it imports nothing else of ours."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

PREFIX = "medusa:"


def options_from_engine_args(args: "EngineArgs") -> dict[str, Any] | None:
    """The speculative options as one dict if they ask for Medusa, else None.

    Merges ``--spec-method``, ``--spec-model`` and ``--spec-tokens`` into ``--speculative-config``
    as ``EngineArgs.create_speculative_config`` does.
    """
    given = args.speculative_config if isinstance(args.speculative_config, dict) else {}
    options = {key.replace("-", "_"): value for key, value in given.items()}
    flags = {
        "method": ("--spec-method", getattr(args, "spec_method", None)),
        "model": ("--spec-model (or --speculative-model)", getattr(args, "spec_model", None)),
        "num_speculative_tokens": ("--spec-tokens", getattr(args, "spec_tokens", None)),
    }
    merged = options | {key: value for key, (_, value) in flags.items() if value is not None}
    if not _asks_for_medusa(merged):
        return None
    for key, (flag, value) in flags.items():
        if value is not None and key in options:
            raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
    return merged


def _asks_for_medusa(options: dict[str, Any]) -> bool:
    return options.get("method") == "medusa" or str(options.get("model")).startswith(PREFIX)
