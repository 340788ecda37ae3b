"""The tool that writes and compares manifests, on a package of a few lines."""

import json
import sys

import pytest

from ci import seams
from vllm_medusa import manifest

OLD = {
    "one.py": "def kept(): return 1\n\n\ndef changed(a):\n    return a\n",
    "two.py": "def renamed(): pass\n\n\nclass Moved:\n    pass\n",
}
NEW = {
    "one.py": "def kept(): return 1\n\n\ndef changed(a, b):\n    return a\n",
    "two.py": "def other(): pass\n",
    "three.py": "class Moved:\n    pass\n",
}
TEXTS = {"use": "called", "why": "because", "until": "stays"}


def write_tree(folder, files):
    (folder / "vllm").mkdir(parents=True)
    for name, text in files.items():
        (folder / "vllm" / name).write_text(text)
    return folder


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """Two releases, a manifest of the old one, and a function that runs the tool."""
    sources = {
        "1.0": write_tree(tmp_path / "old", OLD),
        "2.0": write_tree(tmp_path / "new", NEW),
    }
    folder = tmp_path / "patches"
    folder.mkdir()
    monkeypatch.setattr(manifest, "manifest_folder", lambda: folder)
    names = ("vllm.one:kept", "vllm.one:changed", "vllm.two:renamed", "vllm.two:Moved")
    entries = [{"name": name} | TEXTS for name in names]
    (folder / "1.0.json").write_text(json.dumps({"vllm": "1.0", "seams": entries}))

    def run(*arguments):
        given = [f"--source={version}={root}" for version, root in sources.items()]
        monkeypatch.setattr(sys, "argv", ["seams", *arguments, *given])
        return seams.main()

    assert run("update") == 0
    return run


def names(version):
    return [seam["name"] for seam in manifest.read_manifest(version)]


def test_update_fills_in_fingerprints_and_keeps_texts(releases):
    for seam in manifest.read_manifest("1.0"):
        assert len(seam.pop("sha256")) == 64
        assert seam.pop("name").startswith("vllm.")
        assert seam == TEXTS
    assert releases("check") == 0


def test_check_names_what_differs(releases, tmp_path, capsys):
    (tmp_path / "old" / "vllm" / "one.py").write_text(NEW["one.py"])
    manifest._parse.cache_clear()
    assert releases("check", "1.0") == 1
    assert capsys.readouterr().out == "vLLM 1.0: vllm.one:changed: differs from the manifest\n"


def test_diff_shows_each_changed_seam(releases, capsys):
    assert releases("diff", "1.0", "2.0") == 0
    output = capsys.readouterr().out
    assert "=== vllm.one:changed\n    use: called\n    why: because\n" in output
    assert "-def changed(a):\n+def changed(a, b):\n     return a\n" in output
    assert "vllm.one:kept" not in output
    assert "    is gone\n" in output  # renamed
    assert "    is gone; Moved is now defined in vllm.three\n" in output
    assert output.endswith("3 of 4 seams differ between 1.0 and 2.0\n")


def test_new_starts_a_manifest_without_what_is_gone(releases, capsys):
    assert releases("new", "2.0", "--from", "1.0") == 0
    assert names("2.0") == ["vllm.one:kept", "vllm.one:changed"]
    assert "left out, is gone: vllm.two:renamed" in capsys.readouterr().out
    assert releases("check") == 0
    old, new = (manifest.read_manifest(version) for version in ("1.0", "2.0"))
    assert old[0] == new[0]
    assert old[1]["sha256"] != new[1]["sha256"]
    with pytest.raises(SystemExit, match="is there already"):
        releases("new", "2.0", "--from", "1.0")


def test_add_writes_a_seam_into_every_manifest_or_those_named(releases):
    releases("new", "2.0", "--from", "1.0")
    texts = ["--use", "read", "--why", "why not", "--until", "stays"]
    assert releases("add", "vllm.three:Moved", "2.0", *texts) == 0
    assert names("2.0")[-1] == "vllm.three:Moved"
    assert "vllm.three:Moved" not in names("1.0")
    assert releases("add", "vllm.one:kept", *texts) == 0
    for version in ("1.0", "2.0"):
        assert names(version)[0] == "vllm.one:kept"  # in its place, with new texts
        assert manifest.read_manifest(version)[0]["use"] == "read"
    with pytest.raises(SystemExit, match=r"not in vLLM 1\.0: vllm\.three:Moved"):
        releases("add", "vllm.three:Moved", *texts)
    assert "vllm.three:Moved" not in names("1.0")


def test_a_release_that_is_not_here_is_said_with_the_way_to_get_it(releases):
    with pytest.raises(SystemExit, match=r"not here: run python -m ci\.vllm_source 3\.0"):
        releases("diff", "1.0", "3.0")
    with pytest.raises(SystemExit, match="expected VERSION=FOLDER"):
        releases("check", "--source", "1.0=nowhere")
