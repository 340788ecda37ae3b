"""What the plugin adds to the start of a vLLM process that does not use Medusa.

vLLM loads its plugins in every process: the front end, the engine core, the workers, and the
short-lived process in which it looks at a model's class. Here each kind is started as often as
asked, with our plugin and with none; the process imports what it has imported when vLLM loads the
plugins, and the CPU time of loading is taken: it is the same on a busy machine.

    make startup      # or: python benchmarks/startup.py --output FOLDER
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_medusa.load import LoadMeter
from vllm_medusa.machine import describe_machine

# What a process of each kind has imported when it calls load_general_plugins().
PROCESSES = {
    "front end": "vllm.engine.arg_utils",
    "engine core": "vllm.v1.engine.core",
    "worker": "vllm.v1.worker.worker_base",
    "model inspection": "vllm.model_executor.models.registry",
}

CHILD = """
import importlib, json, sys, time
importlib.import_module(sys.argv[1])
from vllm.plugins import load_general_plugins
before = set(sys.modules)
start = time.process_time()
load_general_plugins()
seconds = time.process_time() - start
print("RESULT " + json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def load_plugins(module: str, plugins: str) -> dict[str, Any]:
    """Start a process, import a module, load the plugins.

    Args:
        module: what is imported first.
        plugins: the value of VLLM_PLUGINS.

    Returns:
        CPU ``seconds`` that loading took, and the names of the ``modules`` it imported.
    """
    result = subprocess.run(
        [sys.executable, "-c", CHILD, module],
        env=os.environ | {"VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder for startup.json and startup.md")
    args = parser.parse_args()

    meter = LoadMeter()
    own = sum(os.times()[:4])
    rows = []
    for name, module in PROCESSES.items():
        seconds: dict[str, list[float]] = {"medusa": [], "": []}
        modules = []
        for _ in range(args.repetitions):
            for plugins, measured in seconds.items():
                found = load_plugins(module, plugins)
                measured.append(found["seconds"])
                modules = modules or [each for each in found["modules"] if plugins]
        with_plugin, without = (
            1e3 * statistics.median(seconds[plugins]) for plugins in ("medusa", "")
        )
        row = {
            "process": name,
            "with the plugin ms": round(with_plugin, 1),
            "without ms": round(without, 1),
            "added ms": round(with_plugin - without, 1),
            "slowest with ms": round(1e3 * max(seconds["medusa"]), 1),
        }
        print(json.dumps(row | {"modules": modules}), flush=True)
        rows.append(row)
    result = {
        "repetitions": args.repetitions,
        "rows": rows,
        "cores kept busy by other processes": round(meter.others(sum(os.times()[:4]) - own), 3),
        "machine": describe_machine(),
    }
    if args.output:
        (args.output / "startup.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.output / "startup.md").write_text(page(result))


def page(result: dict[str, Any]) -> str:
    """A page for docs/."""
    rows = result["rows"]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    table = "\n".join(lines)
    machine = "\n".join(f"- {key}: {value}" for key, value in result["machine"].items())
    others = result["cores kept busy by other processes"]
    return f"""# What the plugin adds to vLLM's start

Made by `make startup` (benchmarks/startup.py): every kind of process was started
{result["repetitions"]} times with the plugin (`VLLM_PLUGINS=medusa`) and as often without any
(`VLLM_PLUGINS=`), in turn. Measured is the CPU time of vLLM's `load_general_plugins()`; medians.
Medusa is not asked for. Others kept {others} cores busy.

{table}

{machine}
"""


if __name__ == "__main__":
    main()
