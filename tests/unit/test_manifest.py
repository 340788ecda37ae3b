"""Fingerprints of vLLM's seams."""

import ast
import hashlib

import pytest

from vllm_medusa.manifest import fingerprint, read_manifest, supported_versions

MODULE = '''
"""A module with a sign of two bytes: \u00e9."""

import os


def first(): return "\u00e9", os


class Outer:
    """\u00e9"""

    @property
    def value(self):
        text = """a
  b\x0cc"""
        return text

    class Inner:
        def method(self): pass  # \u00e9
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("def own(): pass\n")
    (tmp_path / "package" / "module.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("name", ["first", "Outer", "Outer.value", "Outer.Inner.method"])
def test_fingerprint_is_that_of_the_source_segment(name, root):
    node = ast.parse(MODULE)
    for part in name.split("."):
        node = next(item for item in node.body if getattr(item, "name", None) == part)
    segment = ast.get_source_segment(MODULE, node)
    expected = hashlib.sha256(segment.encode()).hexdigest()
    assert fingerprint(f"package.module:{name}", root) == expected


def test_a_package_is_found_in_its_init(root):
    expected = hashlib.sha256(b"def own(): pass").hexdigest()
    assert fingerprint("package:own", root) == expected


@pytest.mark.parametrize(
    "seam", ["package.module:gone", "package.module:Outer.gone", "package.gone:first"]
)
def test_what_is_gone_has_no_fingerprint(seam, root):
    assert fingerprint(seam, root) is None


def test_every_seam_of_a_manifest_says_why():
    for version in supported_versions():
        seams = read_manifest(version)
        names = [seam["name"] for seam in seams]
        assert len(names) == len(set(names))
        for seam in seams:
            assert all(seam[key] for key in ("use", "why", "until")), seam["name"]
            assert len(seam["sha256"]) == 64


def test_a_release_without_manifest_is_refused():
    with pytest.raises(RuntimeError, match=r"does not support vLLM 0\.1\.0; it supports 0\.32\.0"):
        read_manifest("0.1.0")
