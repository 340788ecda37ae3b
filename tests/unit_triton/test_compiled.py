"""The kernels are compiled to machine code; only running them takes a GPU."""

import json
import os
import subprocess
import sys

import pytest

# Of one program, by capability: CUDA C++ Programming Guide, technical specifications.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize("capability", [86, 90])
def test_compiled_for(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.unit_triton.compile_for_gpu", str(capability)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    needs = json.loads(result.stdout.splitlines()[-1])
    # Attention and compaction at two shapes.
    assert {name: len(each) for name, each in needs.items()} == {
        "_attention_kernel": 2,
        "_merge_splits_kernel": 2,
        "_move_kernel": 2,
        "_uniform_kernel": 1,
        "_walk_kernel": 1,
    }
    # All are kept to what the smallest of the supported GPUs has.
    assert 0 < max(map(max, needs.values())) <= min(SHARED_MEMORY.values())
