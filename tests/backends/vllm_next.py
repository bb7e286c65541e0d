"""Lay the Python of a vLLM that has no CPU build beside the compiled parts of the CPU build that is installed.

``python tests/backends/vllm_next.py vllm==0.33.0 FOLDER``: with FOLDER on its path, Python has that vLLM on a CPU. What
is called of a version is held to its real modules that way. Kernels are those of the installed version.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def lay(wheel: Path, compiled: Path, folder: Path) -> None:
    """Unpack the Python of a wheel, and link the compiled parts that lie in another vLLM."""
    with ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if not name.endswith((".so", ".cubin"))])
    for part in compiled.glob("*.so"):
        link = folder / "vllm" / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)
    (info,) = folder.glob("vllm-*.dist-info")
    metadata = info / "METADATA"
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    info.rename(folder / f"vllm-{version}+cpu.dist-info")  # vLLM looks there whether it is a CPU build


def main(wanted: str, folder: str) -> None:
    """Fetch a version and lay it into a folder."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "run it with the Python that has a CPU build: make vllm"
    with tempfile.TemporaryDirectory() as fetched:
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", fetched]
        subprocess.run([*words, wanted], check=True)
        (wheel,) = Path(fetched).glob("*.whl")
        lay(wheel, Path(spec.origin).parent, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
