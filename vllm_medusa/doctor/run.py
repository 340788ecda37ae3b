"""The whole examination."""

from __future__ import annotations

from vllm_medusa.doctor.cluster import cluster_findings
from vllm_medusa.doctor.cpu import cpu_findings
from vllm_medusa.doctor.engine import ask_vllm, engine_findings, gpu_findings
from vllm_medusa.doctor.findings import Finding
from vllm_medusa.doctor.packages import package_findings


def examine() -> list[Finding]:
    """Everything the doctor looks at, in the order of the report; takes half a minute."""
    findings = list(package_findings())
    facts = ask_vllm()
    findings += engine_findings(facts)
    findings += gpu_findings(facts)
    if facts.on_cpu:
        findings += cpu_findings(facts)
    findings += cluster_findings()
    return findings
