"""Getting the Python source of a release."""

import subprocess
import zipfile

import pytest

from ci import vllm_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_source, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def pip(monkeypatch, answer):
    """Have ``answer`` called with pip's arguments in pip's place."""

    def run(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        return answer(command, options)

    monkeypatch.setattr(subprocess, "run", run)


def test_python_files_are_kept_and_found_again(cache, monkeypatch):
    def download(command, options):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/vllm-1.0-cp38-abi3-any.whl", "w") as wheel:
            for name in ("vllm/__init__.py", "vllm/v1/a.py", "vllm/_C.abi3.so", "other/b.py"):
                wheel.writestr(name, name)
        return subprocess.CompletedProcess(command, 0, "", "")

    pip(monkeypatch, download)
    assert vllm_source.find_source("1.0") is None
    assert vllm_source.fetch_source("1.0") == vllm_source.find_source("1.0") == cache / "vllm-1.0"
    kept = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert kept == {"vllm-1.0/vllm/__init__.py", "vllm-1.0/vllm/v1/a.py"}


def test_a_wheel_that_cannot_be_had_is_said_and_leaves_nothing(cache, monkeypatch):
    def fail(command, options):
        return subprocess.CompletedProcess(command, 1, "", "no disk")

    pip(monkeypatch, fail)
    with pytest.raises(RuntimeError, match=r"pip could not download vLLM 1\.0: no disk"):
        vllm_source.fetch_source("1.0")
    assert list(cache.iterdir()) == []


def test_a_slow_download_is_ended(cache, monkeypatch):
    def never(command, options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    pip(monkeypatch, never)
    with pytest.raises(RuntimeError, match=r"vLLM 1\.0 was not downloaded within 7 s"):
        vllm_source.fetch_source("1.0", timeout=7)
    assert list(cache.iterdir()) == []


def test_the_installed_release_is_taken_where_it_is():
    import vllm

    version = vllm_source.installed_version()
    assert version == vllm.__version__.split("+")[0]
    assert (vllm_source.find_source(version) / "vllm" / "__init__.py").samefile(vllm.__file__)


def test_compiled_parts_of_the_installed_release_are_linked(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    vllm_source.link_compiled_parts(tmp_path)
    vllm_source.link_compiled_parts(tmp_path)  # again: links are renewed
    links = list((tmp_path / "vllm").iterdir())
    assert links and all(link.is_symlink() and link.is_file() for link in links)
    monkeypatch.setattr(vllm_source, "installed_version", lambda: None)
    with pytest.raises(RuntimeError, match="no vLLM with compiled parts"):
        vllm_source.link_compiled_parts(tmp_path)
