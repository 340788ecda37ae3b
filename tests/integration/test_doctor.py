"""``vllm-medusa doctor`` on the installation that runs the tests."""

import json
import os
import subprocess
import sys

import pytest

from vllm_medusa.cpu_setup import cpu_environment
from vllm_medusa.doctor.packages import SECTION


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the findings by section and name."""
    result = subprocess.run(
        [sys.executable, "-m", "vllm_medusa.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | cpu_environment() | environment,
    )
    assert result.stdout, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert report["works"] == (result.returncode == 0)
    return result.returncode, {
        f"{finding['section']}: {finding['name']}": finding for finding in report["findings"]
    }


def test_this_installation_works():
    code, found = doctor()
    errors = [finding for finding in found.values() if finding["status"] == "error"]
    assert code == 0, errors
    assert found["vLLM: runner"]["found"].startswith("V1")
    assert found["vLLM: attention backend"]["found"] == "CPUAttentionBackend"
    assert found["vLLM: manifest"]["status"] == "ok"
    assert found["CPU: threads"]["status"] == "ok"
    assert found["CPU: preloads"]["status"] == "ok"
    assert found["CPU: tree attention kernel"]["found"].endswith(".so")


def test_a_vllm_that_cannot_be_imported(tmp_path):
    """As torchvision breaks it: an error in the middle of vLLM's imports."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('operator nms is missing')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, found = doctor(PYTHONPATH=path, VLLM_PLUGINS="lora")
    assert code == 1
    assert "operator nms is missing" in found["vLLM: import"]["found"]
    assert found["vLLM: import"]["remedy"]
    assert found[f"{SECTION}: entry point"]["remedy"] == "export VLLM_PLUGINS=lora,medusa"


CLUSTER = """
import os
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
from vllm_medusa.doctor.cluster import cluster_findings

os.environ["RAY_ADDRESS"] = cluster.address
for finding in cluster_findings():
    print("FOUND", finding.name, finding.status, finding.found)
cluster.shutdown()
"""


def test_nodes_of_a_ray_cluster():
    pytest.importorskip("ray")
    result = subprocess.run(
        [sys.executable, "-c", CLUSTER], capture_output=True, text=True, timeout=300
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("FOUND node")]
    assert len(lines) == 2, result.stdout[-2000:] + result.stderr[-2000:]
    for line in lines:
        assert " ok Python" in line and "vllm-medusa" in line
