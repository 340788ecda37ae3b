"""Write the fingerprints of a release's seams into its manifest, or show which differ.

python ci/update_manifest.py 0.32.0 FOLDER          # FOLDER holds the package vllm
python ci/update_manifest.py 0.32.0 FOLDER --check
"""

import argparse
import json
import sys
from pathlib import Path

from vllm_medusa.manifest import differing_seams, fingerprint, manifest_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("folder", type=Path, help="folder that holds the package vllm")
    parser.add_argument("--check", action="store_true", help="show differences, write nothing")
    args = parser.parse_args()
    if args.check:
        differing = differing_seams(args.version, args.folder)
        print("\n".join(differing) or "all seams are as tested")
        return 1 if differing else 0
    path = manifest_folder() / f"{args.version}.json"
    manifest = json.loads(path.read_text())
    for seam in manifest["seams"]:
        seam["sha256"] = fingerprint(seam["name"], args.folder)
        if seam["sha256"] is None:
            print(f"no such seam: {seam['name']}", file=sys.stderr)
            return 1
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
