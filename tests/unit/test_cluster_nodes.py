"""What is said about nodes of a cluster that lack something; real nodes are asked in
tests/integration/test_ray.py."""

import pytest

from tests.integration.tiny import make_heads
from vllm_medusa import __version__
from vllm_medusa.cluster.nodes import _problems
from vllm_medusa.cluster.report import NodeReport, heads_digests, node_report
from vllm_medusa.heads.formats import HeadsError

HERE = NodeReport("1.2.3", "0.32.0+cpu", "", {"heads.safetensors": "ab", "config.json": "cd"}, "")


def test_nodes_that_are_alike_have_no_problems():
    assert list(_problems(HERE, HERE)) == []


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"plugin": "1.2.2"}, ["vllm-medusa 1.2.2", "pip install vllm-medusa==1.2.3"]),
        ({"vllm": "0.31.0"}, ["vLLM 0.31.0", "here 0.32.0+cpu"]),
        ({"vllm_problem": "vLLM differs in: a:b"}, ["vLLM differs in: a:b"]),
        ({"heads": {}, "heads_problem": "No heads."}, ["No heads. Copy the heads to the same"]),
        ({"heads": HERE.heads | {"config.json": "x"}}, ["differ", "in config.json. Copy"]),
        ({"heads": {"config.json": "cd"}}, ["differ", "in heads.safetensors. Copy"]),
    ],
)
def test_one_problem_is_one_line(there, words):
    (line,) = _problems(HERE._replace(**there), HERE)
    for word in words:
        assert word in line


def test_this_machine(tmp_path):
    heads = make_heads(tmp_path / "heads", 2)
    report = node_report(str(heads), None)
    assert report.plugin == __version__
    assert (report.vllm_problem, report.heads_problem) == ("", "")
    assert sorted(report.heads) == ["config.json", "medusa_lm_head.safetensors"]
    other = heads_digests(str(make_heads(tmp_path / "other", 2, seed=1)), None)
    assert other["config.json"] == report.heads["config.json"]
    assert other["medusa_lm_head.safetensors"] != report.heads["medusa_lm_head.safetensors"]
    assert "no such folder" in node_report(str(tmp_path / "none"), None).heads_problem
    with pytest.raises(HeadsError, match="no such folder"):
        heads_digests(str(tmp_path / "none"), None)
