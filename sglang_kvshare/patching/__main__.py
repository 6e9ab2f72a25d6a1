"""For maintainers: makes the checksums of a version's patches from a stock SGLang.

    python -m sglang_kvshare.patching patches/sglang-0.5.23 SITE

``SITE`` holds the package ``sglang`` as it comes in the wheel. A test compares what is checked in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_kvshare.patching.patch_set import CHECKSUMS, checksums, read_patches, to_json


def main(folder: Path, site: Path) -> None:
    """Write ``checksums.json`` into the folder of the patches."""
    patches = read_patches(folder)
    stock = {path: (site / path).read_bytes() for patch in patches for path in patch.hunks}
    table = to_json(checksums(patches, stock))
    (folder / CHECKSUMS).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m sglang_kvshare.patching FOLDER SITE\n\n{__doc__}")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
