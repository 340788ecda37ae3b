"""Fingerprints of vLLM's seams."""

import hashlib

import pytest

from vllm_medusa.manifest import (
    differing_seams,
    fingerprint,
    manifest_folder,
    read_manifest,
    seam_source,
    supported_versions,
)

MODULE = '''
"""A module with a sign of two bytes: \u00e9."""

import os
from typing import Literal

Method = Literal[
    "first",  # \u00e9
]
count: int = 3


def first(): return "\u00e9", os


class Outer:
    """\u00e9"""

    field: Method | None = None

    @property
    def value(self):
        text = """a
  b\x0cc"""
        return text

    class Inner:
        def method(self): pass  # \u00e9
'''

# Whole lines, decorators included.
SOURCES = {
    "first": 'def first(): return "\u00e9", os',
    "Method": 'Method = Literal[\n    "first",  # \u00e9\n]',
    "count": "count: int = 3",
    "Outer": MODULE[MODULE.index("class Outer") :].rstrip("\n"),
    "Outer.field": "    field: Method | None = None",
    "Outer.value": MODULE[MODULE.index("    @property") : MODULE.index("\n\n    class Inner")],
    "Outer.Inner.method": "        def method(self): pass  # \u00e9",
}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("def own(): pass\n")
    (tmp_path / "package" / "module.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", SOURCES)
def test_a_seam_is_its_definition_in_whole_lines(name, root):
    seam = f"package.module:{name}"
    assert seam_source(seam, root) == SOURCES[name]
    assert fingerprint(seam, root) == hashlib.sha256(SOURCES[name].encode()).hexdigest()


def test_a_package_is_found_in_its_init(root):
    assert seam_source("package:own", root) == "def own(): pass"


@pytest.mark.parametrize(
    "seam",
    [
        "package.module:gone",
        "package.module:Outer.gone",
        "package.module:Outer.field.gone",
        "package.gone:first",
    ],
)
def test_what_is_gone_has_no_fingerprint(seam, root):
    assert fingerprint(seam, root) is None


@pytest.mark.parametrize(
    "change",
    [("Literal[", "Optional["), ("@property", "@cached_property"), ("return text", "return None")],
)
def test_a_changed_seam_is_named(change, root, monkeypatch):
    seams = [f"package.module:{name}" for name in ("Method", "first", "Outer.value")]
    seams = [{"name": seam, "sha256": fingerprint(seam, root)} for seam in seams]
    monkeypatch.setattr("vllm_medusa.manifest.read_manifest", lambda version: seams)
    assert differing_seams("1.0", root) == []
    changed = root / "other"
    (changed / "package").mkdir(parents=True)
    text = MODULE.replace(*change)
    (changed / "package" / "module.py").write_text(text, encoding="utf-8")
    (name,) = differing_seams("1.0", changed)
    assert change[0] in SOURCES[name.rpartition(":")[2]]


def test_every_seam_of_a_manifest_says_why():
    assert supported_versions() == ["0.32.0", "0.33.0"]
    assert manifest_folder().is_dir()
    for version in supported_versions():
        seams = read_manifest(version)
        names = [seam["name"] for seam in seams]
        assert len(names) == len(set(names))
        for seam in seams:
            assert all(seam[key] for key in ("use", "why", "until")), seam["name"]
            assert len(seam["sha256"]) == 64


def test_a_seam_says_the_same_in_every_manifest():
    texts = {}
    for version in supported_versions():
        for seam in read_manifest(version):
            said = {key: seam[key] for key in ("use", "why", "until")}
            assert texts.setdefault(seam["name"], said) == said, (version, seam["name"])


def test_a_release_without_manifest_is_refused():
    with pytest.raises(
        RuntimeError, match=r"does not support vLLM 0\.1\.0; it supports 0\.32\.0, 0\.33\.0"
    ):
        read_manifest("0.1.0")
