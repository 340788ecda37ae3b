"""``vllm-medusa inspect``: what it prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_medusa.cli.main import main

HIDDEN, VOCAB = 4, 6


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Two v0.1 heads of one layer, with a config and a tree of three nodes."""
    folder = tmp_path / "[bold]heads"  # brackets must not be taken for rich's markup
    folder.mkdir()
    write(folder, torch.ones(VOCAB, HIDDEN))
    config = {"medusa_num_heads": 2, "base_model_name_or_path": "org/target"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "medusa_tree.json").write_text(json.dumps({"paths": [[0], [1], [0, 0]]}))
    return folder


def write(folder: Path, lm_head: torch.Tensor) -> None:
    tensors = {f"{i}.0.linear.weight": torch.ones(HIDDEN, HIDDEN) for i in range(2)}
    tensors |= {"0.1.weight": lm_head, "1.1.weight": torch.ones(VOCAB, HIDDEN)}
    save_file(tensors, folder / "medusa_lm_head.safetensors")


def inspect_json(heads: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["inspect", str(heads), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_table(
    heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["inspect", str(heads)]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    found = {row[0]: row[1] for row in rows if len(row) == 2}
    assert found["heads"] == found["folder"] == str(heads)
    assert found["files"] == "medusa_lm_head.safetensors"
    assert found["format"] == "medusa-v0.1"
    assert found["made for"] == "org/target"
    assert found["number of heads"] == "2"
    assert found["head type"] == "plain"
    assert found["shape of block_weight"] == "[2, 1, 4, 4]"
    assert found["shape of lm_head"] == "[2, 6, 4]"
    assert found["LM head"] == "one of their own per head, 6 tokens"
    assert found["parameters"] == "80"
    assert found["tree"] == "3 nodes, depth 2: [0], [1], [0, 0]"
    assert "ERROR" not in out


def test_json(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect_json(heads, capsys)
    assert code == 0
    assert (report["format"], report["num_heads"], report["dtype"]) == ("medusa-v0.1", 2, "float32")
    assert report["tree"] == {"nodes": 3, "depth": 2, "paths": [[0], [1], [0, 0]]}
    assert report["shapes"] == {"block_weight": [2, 1, 4, 4], "lm_head": [2, 6, 4]}
    assert report["warnings"] == [] and report["errors"] == []


def test_sequential_heads(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"{i}.0.linear.weight": torch.ones(HIDDEN, HIDDEN) for i in range(2)}
    tensors |= {f"{i}.path.weight": torch.ones(HIDDEN, (i + 1) * HIDDEN) for i in range(2)}
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    (heads / "config.json").write_text('{"version": "2", "head_type": "sequential"}')
    code, report = inspect_json(heads, capsys)
    assert code == 0 and report["is_sequential"] and report["warnings"] == []
    assert report["shapes"]["path_weight of the last head"] == [4, 8]
    assert main(["inspect", str(heads)]) == 0
    assert "sequential" in capsys.readouterr().out


def test_warnings_do_not_fail(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (heads / "config.json").write_text('{"medusa_num_heads": 5}')
    code, report = inspect_json(heads, capsys)
    assert code == 0
    assert "medusa_num_heads 5, the tensors say 2" in report["warnings"][0]


def test_no_tree(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (heads / "medusa_tree.json").unlink()
    code, report = inspect_json(heads, capsys)
    assert code == 0 and report["tree"] is None


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("{", "not valid JSON"),
        ('{"paths": [[0, 0]]}', "misses the parents [0]"),
        ('{"paths": [[0], [0, 0], [0, 0, 0]]}', "depth 3"),
        ('{"paths": [[6]]}', "rank 6"),
    ],
)
def test_bad_tree(
    heads: Path, capsys: pytest.CaptureFixture[str], tree: str, expected: str
) -> None:
    (heads / "medusa_tree.json").write_text(tree)
    code, report = inspect_json(heads, capsys)
    assert code == 1 and report["tree"] is None
    assert "medusa_tree.json: " in report["errors"][0] and expected in report["errors"][0]


def test_non_finite_tensors(
    heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(heads, torch.full((VOCAB, HIDDEN), torch.nan))
    code, report = inspect_json(heads, capsys)
    assert code == 1
    assert "0.1.weight: 24 of 24 values are NaN or infinite" in report["errors"][0]
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["inspect", str(heads)]) == 1
    assert "0.1.weight: 24 of 24" in capsys.readouterr().out


def test_bad_heads_are_a_message_not_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_medusa.cli.main", "inspect", str(tmp_path)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 1
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.startswith("vllm-medusa inspect: ") and str(tmp_path) in result.stderr


def test_help_imports_no_command() -> None:
    code = (
        "import sys\n"
        "from vllm_medusa.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'rich', 'vllm')))\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    assert "inspect" in result.stdout


def test_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["inspect"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["inspect", "--help"])
    assert end.value.code == 0 and "--revision" in capsys.readouterr().out
