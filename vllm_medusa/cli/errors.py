"""How every sub-command says that it failed."""

from rich.console import Console


def print_error(command: str, error: object) -> None:
    """The message on standard error, as it is: rich would take [bold] in a path for markup."""
    Console(stderr=True).print(
        f"vllm-medusa {command}: {error}",
        style="red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
