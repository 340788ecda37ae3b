"""The README's tables are those of docs/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_are_those_that_were_measured():
    check = [sys.executable, str(ROOT / "ci" / "update_readme.py"), "--check"]
    assert subprocess.run(check).returncode == 0, "run ci/update_readme.py"
