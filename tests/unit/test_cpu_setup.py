"""cpu_setup: thread binding, preloads and the repairs, without vLLM."""

import importlib.metadata
import subprocess
import sys

import pytest

from vllm_medusa import cpu_setup


@pytest.mark.parametrize(
    ("cores", "text"),
    [([0], "0"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2,5"), ([1, 3, 4, 7], "1,3-4,7")],
)
def test_core_ranges(cores, text):
    assert cpu_setup.core_ranges(cores) == text


@pytest.fixture
def machine(monkeypatch):
    """A machine with cores 0, 1, 4, 5 and no library to preload."""
    monkeypatch.setattr(cpu_setup, "available_cores", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(cpu_setup, "preload_libraries", list)


@pytest.mark.usefixtures("machine")
def test_one_worker_gets_all_cores():
    environment = cpu_setup.cpu_environment()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1,4-5"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["NUMBA_THREADING_LAYER"] == "workqueue"
    assert "LD_PRELOAD" not in environment


@pytest.mark.usefixtures("machine")
def test_workers_share_the_cores():
    environment = cpu_setup.cpu_environment(tensor_parallel_size=2)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|4-5"
    assert environment["OMP_NUM_THREADS"] == "2"
    # A core that can't be shared out evenly stays idle.
    assert cpu_setup.cpu_environment(3)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|4"


@pytest.mark.usefixtures("machine")
def test_more_workers_than_cores_is_refused():
    with pytest.raises(ValueError, match=r"tensor parallel size 5 .* may use 4 \(0-1,4-5\)"):
        cpu_setup.cpu_environment(5)


def test_preloads_come_first_and_once(monkeypatch):
    monkeypatch.setattr(cpu_setup, "preload_libraries", lambda: ["/a/libiomp5.so", "/b/libtc.so"])
    monkeypatch.setenv("LD_PRELOAD", "/c/other.so:/a/libiomp5.so")
    environment = cpu_setup.cpu_environment()
    assert environment["LD_PRELOAD"] == "/a/libiomp5.so:/b/libtc.so:/c/other.so"
    assert environment["KMP_BLOCKTIME"] == "5"


def test_print_env_can_be_evaluated_by_a_shell(capsys, monkeypatch):
    monkeypatch.setattr(cpu_setup, "preload_libraries", lambda: ["/with space/libiomp5.so"])
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    cpu_setup.main(["--print-env"])
    script = capsys.readouterr().out
    # `env` is no shell built-in, and would try to preload the library: ask the shell itself.
    script += 'printf %s "$LD_PRELOAD"'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert result.stdout == "/with space/libiomp5.so"


def test_importing_it_loads_neither_vllm_nor_torch():
    code = "import sys, vllm_medusa.cpu_setup; print({'vllm', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    """The only folder that distributions are looked for in, with vllm-cpu in it."""
    add_distribution(tmp_path, "vllm-cpu", "0.32.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def add_distribution(folder, name, version):
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)


def test_metadata_called_vllm_is_added_beside_vllm_cpu(site_packages):
    said = []
    cpu_setup.add_vllm_metadata(said.append)
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    assert len(said) == 1
    distribution = importlib.metadata.distribution("vllm")
    assert distribution.read_text("INSTALLER") == "vllm-medusa\n"
    # All that `pip uninstall vllm` would remove.
    assert {str(path) for path in distribution.files} == {
        f"vllm-0.32.0+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }
    cpu_setup.add_vllm_metadata(said.append)
    assert len(said) == 1, "the second call has nothing to do"


def test_a_vllm_that_is_there_is_left_alone(site_packages):
    add_distribution(site_packages, "vllm", "0.33.0")
    cpu_setup.add_vllm_metadata(pytest.fail)
    assert importlib.metadata.version("vllm") == "0.33.0"


def test_without_vllm_cpu_nothing_is_added(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    cpu_setup.add_vllm_metadata(pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_companions_that_fail_to_import_are_uninstalled(monkeypatch):
    monkeypatch.setattr(
        cpu_setup, "distribution_version", lambda name: None if name == "torchcodec" else "1"
    )
    commands = []

    def run(command, **_):
        commands.append(command[1:])
        broken = command[-1] == "import torch, torchvision"
        return subprocess.CompletedProcess(
            command, int(broken), stdout="", stderr="RuntimeError: no operator" if broken else ""
        )

    monkeypatch.setattr(subprocess, "run", run)
    said = []
    cpu_setup.remove_broken_companions(said.append)
    uninstalled = [command for command in commands if "uninstall" in command]
    assert [command[-1] for command in uninstalled] == ["torchvision"]
    assert "RuntimeError: no operator" in said[0]


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(cpu_setup, "find_tcmalloc", lambda: None)
    monkeypatch.setattr(cpu_setup.shutil, "which", lambda _: None)
    said = []
    cpu_setup.report_missing(said.append)
    text = "\n".join(said)
    assert "apt-get install libtcmalloc-minimal4" in text
    assert "apt-get install g++" in text
