"""Installs the double into a folder of its own: ``python tests/double/install.py FOLDER [--profile 1.24.1]``.

Processes that have the folder first on PYTHONPATH find the distribution ``habana-torch-plugin`` there, in a version that
says "double", and every ``import torch`` of theirs loads it. Compiling device.cpp takes about 15 s; it is done again
only for another torch.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_LIBRARY = "libhabana_pytorch2_plugin.so"
_VERSIONS = {"1.19": "1.19.0.561", "1.24.1": "1.24.1.482"}
_NO_COMPRESSOR = "0+aotgaudi.double"
"""Intel's images have the quantizer, and vllm-gaudi asks for its version. The double has none, so it says a very old one."""
_AUTOLOAD = "[torch.backends]\ndevice_backend = habana_frameworks.autoload:__autoload\n"
_HL_SMI = """#!/bin/sh
# The double's cards, as `hl-smi -Q index,name,module_id -f csv,noheader,nounits` prints them.
[ "${AOTGAUDI_DOUBLE_DEVICE:-gaudi2}" = gaudi3 ] && name=HL-325L || name=HL-225B
i=0
while [ "$i" -lt "${AOTGAUDI_DOUBLE_CARDS:-1}" ]; do echo "$i, $name, $i"; i=$((i + 1)); done
"""


def install(folder: Path, profile: str) -> None:
    """Makes `folder` anew, in one step. Raises KeyError for a profile that there is not."""
    import torch

    version = f"{_VERSIONS[profile]}+aotgaudi.double"
    with tempfile.TemporaryDirectory(dir=_made(folder.parent), prefix=".double-") as scratch:
        made = Path(scratch) / "made"
        shutil.copytree(_HERE / "habana_frameworks", made / "habana_frameworks")
        package = made / "habana_frameworks"
        (package / "profile.txt").write_text(profile, encoding="ascii")
        (package / "torch" / "required_version.txt").write_text(torch.__version__, encoding="ascii")
        (package / "torch" / "lib").mkdir(exist_ok=True)
        shutil.copy(_library(folder.parent / ".device"), package / "torch" / "lib" / _LIBRARY)
        _write_system(made / "usr" / "lib" / "habanalabs")
        _write_metadata(made, "habana-torch-plugin", version, entry_points=_AUTOLOAD)
        _write_metadata(made, "neural_compressor_pt", _NO_COMPRESSOR)
        tool = made / "bin" / "hl-smi"
        _made(tool.parent)
        tool.write_text(_HL_SMI, encoding="ascii")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        compileall.compile_dir(package, quiet=1)  # Every process imports it.
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _library(cache: Path) -> Path:
    """The compiled device; kept by the source and torch that it was made of."""
    import torch

    root, source = Path(torch.__file__).parent, _HERE / "device.cpp"
    name = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = _made(cache) / f"{name}.so"
    if not library.exists():
        includes = [f"-I{root / 'include' / path}" for path in ("", "torch/csrc/api/include")]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
        unfinished = library.with_suffix(".tmp")
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(source), *includes, *libraries]
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    return library


def _write_system(folder: Path) -> None:
    """Small files named like the graph compiler and its kernels, for whoever hashes them."""
    for name in ("libSynapse.so", "libtpc_kernels.so", "libtpc_fuser.so", "libgaudi2_complex_guid_lib.so"):
        _made(folder)
        (folder / name).write_bytes(f"double of {name}\n".encode())


def _write_metadata(site: Path, name: str, version: str, entry_points: str = "") -> None:
    folder = _made(site / f"{name.replace('-', '_')}-{version}.dist-info")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, content in (("METADATA", metadata), ("entry_points.txt", entry_points), ("RECORD", "")):
        (folder / file).write_text(content, encoding="ascii")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", choices=sorted(_VERSIONS), default="1.24.1")
    options = parser.parse_args()
    install(options.folder.resolve(), options.profile)


if __name__ == "__main__":
    sys.exit(main())
