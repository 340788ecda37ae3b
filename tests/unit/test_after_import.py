"""A function is called once a module has been imported, and no module is imported for it."""

import importlib
import sys

import pytest

from vllm_medusa.after_import import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``later`` with the module ``later.module``, which nobody has imported."""
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "__init__.py").write_text("")
    (tmp_path / "later" / "module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in ("later", "later.module"):
        sys.modules.pop(name, None)


def test_called_once_when_the_code_has_run(package):
    seen = []
    before = list(sys.meta_path)
    for number in (1, 2):  # each waits for itself
        after_import(
            "later.module",
            lambda number=number: seen.append((number, sys.modules["later.module"].value)),
        )
    import_nothing = "later" not in sys.modules and seen == []
    assert import_nothing
    importlib.import_module("later")
    assert seen == []
    importlib.import_module("later.module")
    importlib.import_module("later.module")
    assert sorted(seen) == [(1, 1), (2, 1)]
    assert sys.meta_path == before


def test_called_at_once_where_it_is_imported(package):
    importlib.import_module("later.module")
    seen = []
    after_import("later.module", lambda: seen.append(1))
    assert seen == [1]


def test_a_module_that_is_not_there(package):
    after_import("later.gone", pytest.fail)
    with pytest.raises(ModuleNotFoundError, match=r"later\.gone"):
        importlib.import_module("later.gone")
