"""The `vllm serve` commands of the documentation, through vLLM's own parser with the plugin."""

import argparse
import importlib
import re

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests import docs
from vllm_medusa.cli.main import COMMANDS
from vllm_medusa.config import OPTIONS

SERVE = [
    command
    for command in docs.commands(("vllm",))
    if command.words[:2] == ("vllm", "serve") and len(command.words) > 2
]


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def test_commands_are_found():
    assert len(SERVE) > 8


@pytest.mark.parametrize("command", SERVE, ids=str)
def test_serve_commands(command, parser):
    args = parser.parse_args([*command.words[2:]])
    assert args.model_tag == "MODEL"
    if isinstance(args.speculative_config, dict):
        assert set(args.speculative_config) <= set(OPTIONS)
    else:
        assert "HEADS" in args.spec_model


def test_options_that_are_mentioned_exist(parser):
    """Every `--option` on the pages is one of vLLM's, of ours, or of pip's and the like."""
    known = set(parser._option_string_actions) | {"--no-deps", "--nproc-per-node"}
    for module, _ in COMMANDS.values():
        ours = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(ours)
        known |= set(ours._option_string_actions)
    for page in docs.PAGES:
        for span in docs.code_spans(page):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
                if not span.startswith(("python", "pip")):
                    assert option in known, f"{docs.name(page)}: {span}"
