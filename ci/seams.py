"""The manifests in patches/: check them, write them, compare releases, add seams.

python -m ci.seams check [VERSION ...]      is each seam's source the one in its manifest?
python -m ci.seams update [VERSION ...]     write the fingerprints anew, also those of new entries
python -m ci.seams diff OLD NEW             what changed in the seams of OLD, as unified diffs
python -m ci.seams new VERSION --from OLD   start a manifest with the seams and texts of OLD
python -m ci.seams add SEAM --use ... --why ... --until ... [VERSION ...]
                                            add a seam, or give it new texts

Without VERSION: every release that has a manifest. Sources are the installed vLLM and what
``ci.vllm_source`` unpacked; ``--source VERSION=FOLDER`` names another folder that holds the package
``vllm``. ``docs/adding-a-vllm-release.md`` says when to use which.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ci.vllm_source import find_source
from vllm_medusa import manifest
from vllm_medusa.manifest import fingerprint, read_manifest, seam_source, supported_versions

TEXTS = ("use", "why", "until")


class Sources:
    """The folders that hold the package ``vllm`` of each release."""

    def __init__(self, given: list[str]) -> None:
        self.given: dict[str, Path] = {}
        for text in given:
            version, _, folder = text.partition("=")
            if not (Path(folder) / "vllm").is_dir():
                raise SystemExit(f"--source {text}: expected VERSION=FOLDER with FOLDER/vllm in it")
            self.given[version] = Path(folder)

    def __call__(self, version: str) -> Path:
        root = self.given.get(version) or find_source(version)
        if root is None:
            raise SystemExit(
                f"the source of vLLM {version} is not here: run python -m ci.vllm_source {version}"
            )
        return root


def problems(seams: list[dict[str, Any]], root: Path) -> Iterator[str]:
    """What is wrong with each seam of a manifest, in words."""
    for seam in seams:
        found = fingerprint(seam["name"], root)
        if found is None:
            yield f"{seam['name']}: is gone{moved_to(seam['name'], root)}"
        elif found != seam.get("sha256"):
            yield f"{seam['name']}: differs from the manifest"


def moved_to(seam: str, root: Path) -> str:
    """Where else something of a seam's name is defined: a hint for one that is gone."""
    name = seam.rpartition(":")[2].rpartition(".")[2]
    definition = re.compile(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)
    places = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sorted((root / "vllm").rglob("*.py"))
        if definition.search(path.read_text(encoding="utf-8"))
    ]
    return f"; {name} is now defined in {', '.join(places[:5])}" if places else ""


def refreshed(seams: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """The seams with the fingerprints of a source, None where a seam is gone."""
    return [seam | {"sha256": fingerprint(seam["name"], root)} for seam in seams]


def difference(seam: dict[str, Any], old: Path, new: Path) -> str | None:
    """What changed in a seam between two sources, as a unified diff below what it is used for; None
    if nothing did."""
    before, after = seam_source(seam["name"], old), seam_source(seam["name"], new)
    if before == after:
        return None
    title = f"=== {seam['name']}\n    use: {seam['use']}\n    why: {seam['why']}\n"
    if before is None:
        return f"{title}    is not in the old release\n"
    if after is None:
        return f"{title}    is gone{moved_to(seam['name'], new)}\n"
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), "old", "new", lineterm="")
    return title + "\n".join(lines) + "\n"


def write_manifest(version: str, seams: list[dict[str, Any]]) -> None:
    """Write a manifest; every seam must have a fingerprint."""
    gone = [seam["name"] for seam in seams if seam["sha256"] is None]
    if gone:
        raise SystemExit(f"not in vLLM {version}: {', '.join(gone)}. Nothing was written")
    path = manifest.manifest_folder() / f"{version}.json"
    path.write_text(json.dumps({"vllm": version, "seams": seams}, indent=2) + "\n")


def check(args: argparse.Namespace, sources: Sources) -> int:
    status = 0
    for version in args.version or supported_versions():
        for problem in problems(read_manifest(version), sources(version)):
            print(f"vLLM {version}: {problem}")
            status = 1
    if status == 0:
        print("all seams are as in the manifests")
    return status


def update(args: argparse.Namespace, sources: Sources) -> int:
    for version in args.version or supported_versions():
        write_manifest(version, refreshed(read_manifest(version), sources(version)))
    return 0


def diff(args: argparse.Namespace, sources: Sources) -> int:
    old, new = sources(args.old), sources(args.new)
    seams = read_manifest(args.old)
    found = [text for seam in seams if (text := difference(seam, old, new))]
    print("\n".join(found))
    print(f"{len(found)} of {len(seams)} seams differ between {args.old} and {args.new}")
    return 0


def new(args: argparse.Namespace, sources: Sources) -> int:
    if args.version in supported_versions():
        raise SystemExit(f"patches/{args.version}.json is there already: use update")
    seams = refreshed(read_manifest(args.old), sources(args.version))
    for seam in seams:
        if seam["sha256"] is None:
            hint = moved_to(seam["name"], sources(args.version))
            print(f"left out, is gone: {seam['name']}{hint}")
    write_manifest(args.version, [seam for seam in seams if seam["sha256"] is not None])
    return 0


def add(args: argparse.Namespace, sources: Sources) -> int:
    texts = {key: getattr(args, key) for key in TEXTS}
    for version in args.version or supported_versions():
        seam = {"name": args.seam} | texts | {"sha256": fingerprint(args.seam, sources(version))}
        seams = read_manifest(version)
        places = [place for place, other in enumerate(seams) if other["name"] == args.seam]
        if places:
            seams[places[0]] = seam
        else:
            seams.append(seam)
        write_manifest(version, seams)
    return 0


def parse_args() -> argparse.Namespace:
    description = __doc__ or ""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--source", action="append", default=[], metavar="VERSION=FOLDER", help="a release's source"
    )
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for function in (check, update):
        command = commands.add_parser(function.__name__, parents=[common])
        command.add_argument("version", nargs="*")
        command.set_defaults(run=function)
    command = commands.add_parser("diff", parents=[common])
    command.add_argument("old")
    command.add_argument("new")
    command.set_defaults(run=diff)
    command = commands.add_parser("new", parents=[common])
    command.add_argument("version")
    command.add_argument("--from", dest="old", required=True, metavar="OLD")
    command.set_defaults(run=new)
    command = commands.add_parser("add", parents=[common])
    command.add_argument("seam", help="package.module:qualified.name")
    command.add_argument("version", nargs="*")
    for key in TEXTS:
        command.add_argument(f"--{key}", required=True)
    command.set_defaults(run=add)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    return args.run(args, Sources(args.source))


if __name__ == "__main__":
    sys.exit(main())
