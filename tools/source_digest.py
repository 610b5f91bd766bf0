"""Compute the digest that ties a report to its code: `python -m tools.source_digest`.

sha256 over all nxrt/**/*.py, *.cu and *.cuh in sorted order of their relative paths: each path's
bytes, then the file's bytes.
"""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_digest(root: Path = ROOT) -> str:
    """Return the digest of the package's sources under `root`."""
    paths = [path for suffix in ("py", "cu", "cuh") for path in root.glob(f"nxrt/**/*.{suffix}")]
    digest = hashlib.sha256()
    for relative in sorted(path.relative_to(root).as_posix() for path in paths):
        digest.update(relative.encode())
        digest.update((root / relative).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_digest())
