"""Wheel and sdist: they build, hold what they should, and work beside an installed vLLM."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vllm_medusa

ROOT = Path(__file__).parents[2]
VERSION = vllm_medusa.__version__


def run(*command: object, cwd: Path, status: int = 0) -> str:
    """Run away from the checkout, without what this shell says about paths."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == status, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with a wheel and the sdist it was built from."""
    folder = tmp_path_factory.mktemp("dist")
    # No isolation: the build backend is among the test requirements, so this works offline.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    [path] = built.glob("*.whl")
    return path


def test_names_carry_the_one_version(built):
    assert sorted(path.name for path in built.iterdir()) == [
        f"vllm_medusa-{VERSION}-py3-none-any.whl",
        f"vllm_medusa-{VERSION}.tar.gz",
    ]
    # It is written in one place, and the changelog has a section for it.
    assert f'__version__ = "{VERSION}"' in (ROOT / "vllm_medusa" / "__init__.py").read_text()
    assert VERSION not in (ROOT / "pyproject.toml").read_text()
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_twine_check(built):
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert said.count("PASSED") == 2


def test_what_the_wheel_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in package} == {"vllm_medusa"}
    checkout = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.cpp")
        for path in (ROOT / "vllm_medusa").rglob(pattern)
    }
    manifests = {f"vllm_medusa/patches/{path.name}" for path in (ROOT / "patches").iterdir()}
    assert checkout | manifests <= package
    assert f"vllm_medusa-{VERSION}.dist-info/licenses/LICENSE" in names


def test_what_the_sdist_holds(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    wanted |= {"patches/0.32.0.json", "docs/how-it-works.md", "tests/conftest.py", "ci/setup.sh"}
    assert wanted <= names
    assert not any(name.startswith(("heads/", ".venv", ".cache")) for name in names)


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """Folder of an environment with the wheel in it, which sees the installed vLLM."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = run(python, "-c", ask, cwd=folder)
    # As --system-site-packages would, for the packages of an environment.
    (Path(packages.strip()) / "installed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # --ignore-installed: leave alone the vllm-medusa of the environment that runs the tests.
    install = ["install", "--no-index", "--no-deps", "--ignore-installed", wheel]
    run(*pip, *install, cwd=folder)
    return folder


def test_the_requirements_are_met_beside_vllm():
    for text in importlib.metadata.requires("vllm-medusa") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(version), text


def test_the_command(clean):
    said = run(clean / "env" / "bin" / "vllm-medusa", "--version", cwd=clean)
    assert said == f"vllm-medusa {VERSION}\n"
    said = run(clean / "env" / "bin" / "vllm-medusa", "--help", cwd=clean)
    assert "doctor" in said


SCRIPT = """
import importlib.metadata, sys
[point] = importlib.metadata.entry_points(group="vllm.general_plugins", name="medusa")
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm_medusa, vllm_medusa.manifest
assert vllm_medusa.__file__.startswith(sys.prefix), vllm_medusa.__file__
vllm_medusa.manifest.check_seams()
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--speculative-model", "medusa:HEADS"])
print(point.dist.version, args.spec_model)
"""


def test_vllm_loads_the_installed_plugin(clean):
    (clean / "script.py").write_text(SCRIPT)
    said = run(clean / "env" / "bin" / "python", clean / "script.py", cwd=clean)
    assert said.splitlines()[-1] == f"{VERSION} medusa:HEADS"
