"""What a Gaudi machine compiles with and for: its cards, versions, and digests of the libraries that decide the result.

**Software.** The bridge names a recipe by Synapse's version alone. Its own digest of the libraries is the same whatever they
contain (K-38, ``cache_version.cpp``). So we hash the bridge and its Python, the graph compiler and the kernels ourselves.
These files are large, so we remember a file's digest while its inode, size and both times stay the same.

**Cards** are found without acquiring one, because a process that acquires a card keeps others from it (K-25). We ask these
sources in order, and the first that knows of a card answers: the driver's library (`pyhlml`), the kernel's
``/sys/class/accel``, and the tool ``hl-smi``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from aotgaudi.digest import canonical_json, sha256_bytes, sha256_file
from aotgaudi.errors import StoreError, TargetError, store_errors
from aotgaudi.files import make_directories, write_atomic
from aotgaudi.machine import in_threads

PLUGIN = "habana-torch-plugin"
"""The distribution that contains the bridge."""
SYSTEM_LIBRARIES = Path("usr/lib/habanalabs")
KERNELS_VARIABLE = "GC_KERNEL_PATH"
LOADER_VARIABLE = "LD_LIBRARY_PATH"
"""Where the dynamic loader looks first (ld.so(8))."""

_GRAPH_COMPILER = "libSynapse.so*"
_MEMORY_NAME = "library-digests.json"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the software lies.

    Attributes:
        plugin: The folder of the Python package ``habana_frameworks``.
        system: The folder of the graph compiler and its libraries, which the dynamic loader would take.
        kernels: The libraries that ``GC_KERNEL_PATH`` names.
    """

    plugin: Path
    system: Path
    kernels: tuple[Path, ...]

    @classmethod
    def find(cls, environment: Mapping[str, str], root: Path = Path("/")) -> Installation:
        """Returns where this machine's software lies. Imports none of it.

        Raises:
            TargetError: the bridge is not installed.
        """
        spec = importlib.util.find_spec("habana_frameworks")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise TargetError(
                f"target: {PLUGIN} is not installed here (it comes with Intel's images for Gaudi)"
            )
        kernels = tuple(Path(part) for part in environment.get(KERNELS_VARIABLE, "").split(":") if part)
        searched = (Path(part) for part in environment.get(LOADER_VARIABLE, "").split(":") if part)
        ahead = (folder for folder in searched if any(folder.glob(_GRAPH_COMPILER)))
        return cls(Path(places[0]), next(ahead, root / SYSTEM_LIBRARIES), kernels)

    def components(self) -> Mapping[str, tuple[Path, ...]]:
        """Returns the files of each component of a key, in order of names.

        Raises:
            TargetError: a component has no file, so something that compiles is missing.
        """
        torch = self.plugin / "torch"
        found = {
            "bridge": _files(torch / "lib", "libhabana_pytorch*.so*"),
            "bridge-python": _files(torch / "dynamo", "**/*.py"),
            "graph-compiler": _files(self.system, _GRAPH_COMPILER),
            "kernels": (
                *_files(self.system, "libtpc_fuser*.so*"),
                *_files(self.system, "lib*complex_guid*.so*"),
                *self._kernels(),
            ),
        }
        for name, files in found.items():
            if not files:
                raise TargetError(f"target: the {name} of the Gaudi software was not found on this machine")
        return found

    def _kernels(self) -> tuple[Path, ...]:
        missing = [path for path in self.kernels if not path.is_file()]
        if missing:
            raise TargetError(f"target: {KERNELS_VARIABLE} names {missing[0]}, which is not there")
        return self.kernels or _files(self.system, "libtpc_kernels*.so*")


def library_digests(installation: Installation, memory: Path | None) -> Mapping[str, str]:
    """Returns the digest of each component: sha256 over the names and the sha256 of its files, sorted by name.

    Files of which `memory` (see `DigestMemory`) knows the digest are not read.

    Raises:
        TargetError: a component has no file.
        StoreError: a file cannot be read.
    """
    components = installation.components()
    digests = DigestMemory(memory).digests({path for files in components.values() for path in files})
    return {
        name: sha256_bytes(canonical_json(sorted([path.name, digests[path]] for path in files)))
        for name, files in components.items()
    }


class DigestMemory:
    """Remembers digests of files by path, for as long as a file's inode, size and times stay the same.

    It only saves time: if it cannot be read or written, files are hashed again.
    """

    def __init__(self, directory: Path | None, hash_file: Callable[[Path], str] = sha256_file) -> None:
        """Keeps digests in `directory`, which is made when needed. None means that it keeps nothing."""
        self._path = None if directory is None else directory / _MEMORY_NAME
        self._hash_file = hash_file

    def digests(self, paths: Iterable[Path]) -> Mapping[Path, str]:
        """Returns the sha256 of every file. Raises StoreError if one cannot be read."""
        stamps = {path: _stamp(path) for path in paths}
        known = self._read()
        unknown = [path for path, stamp in stamps.items() if known.get(str(path), (None,))[0] != stamp]
        if unknown:
            hashed = zip(unknown, in_threads(self._hashed, unknown), strict=True)
            known |= {str(path): (stamps[path], digest) for path, digest in hashed}
            self._write(known)
        return {path: known[str(path)][1] for path in stamps}

    def _hashed(self, path: Path) -> str:
        with store_errors("read", path):
            return self._hash_file(path)

    def _read(self) -> dict[str, tuple[list[int], str]]:
        if self._path is None:
            return {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            rows = json.loads(self._path.read_bytes())
            return {str(path): ([int(part) for part in stamp], str(digest)) for path, stamp, digest in rows}
        return {}

    def _write(self, known: Mapping[str, tuple[list[int], str]]) -> None:
        if self._path is None:
            return
        rows = [[path, stamp, digest] for path, (stamp, digest) in sorted(known.items())]
        with contextlib.suppress(OSError, StoreError):
            make_directories(self._path.parent)
            write_atomic(self._path, json.dumps(rows).encode())


def _stamp(path: Path) -> list[int]:
    with store_errors("read", path):
        status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _files(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Returns the regular files of a folder, each once: libraries also have links with their versions."""
    found = {path.resolve() for path in folder.glob(pattern) if path.is_file()}
    return tuple(sorted(found))


def python_version() -> str:
    """Returns ``major.minor`` of this interpreter, on which the choice of the bridge's libraries depends."""
    return ".".join(platform.python_version_tuple()[:2])


DeviceType = Literal["gaudi", "gaudi2", "gaudi3"]

MODULES_VARIABLE = "HABANA_VISIBLE_MODULES"
"""Lists the cards that a process may use, by their module ids."""

VENDOR = "0x1da3"
"""The vendor id of Habana Labs in the PCI database."""

_HL_SMI_COLUMNS = ("index", "name", "module_id")
_HL_SMI_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        index: The driver's number, from 0.
        device_type: For example ``gaudi2``.
        module_id: The number in ``HLS_MODULE_ID`` and ``HABANA_VISIBLE_MODULES``; None if unknown.
        is_busy: Whether a process holds it; None if we cannot see that.
    """

    index: int
    device_type: DeviceType
    module_id: int | None
    is_busy: bool | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The cards of a machine, in order of their indices."""

    cards: tuple[Card, ...] = ()

    def device_type(self) -> DeviceType:
        """Returns the type of all cards.

        Raises:
            TargetError: there is no card, or there are cards of two types.
        """
        types = sorted({card.device_type for card in self.cards})
        if not types:
            raise TargetError("target: this machine has no Gaudi that its driver shows")
        if len(types) > 1:
            raise TargetError(
                f"target: this machine has cards of several types: {', '.join(types)};"
                " show one with HABANA_VISIBLE_DEVICES"
            )
        return types[0]


def usable_modules(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[int | None, ...]:
    """Returns the module ids of the cards that a process with this environment may use; None means any free card.

    These are the cards that ``HABANA_VISIBLE_MODULES`` lists, if it lists numbers, else all cards that are not busy.

    Raises:
        TargetError: there is no such card, or there are cards of two types.
    """
    listed = environ.get(MODULES_VARIABLE, "").replace(",", " ").split()
    if listed and all(map(str.isdecimal, listed)):
        return tuple(map(int, listed))
    inventory = find_cards(root)
    inventory.device_type()
    modules = tuple(card.module_id for card in inventory.cards if not card.is_busy)
    if not modules:
        raise TargetError(f"target: all {len(inventory.cards)} cards of this machine are busy")
    return modules if None not in modules else (None,)


def device_type_of(name: str) -> DeviceType | None:
    """Returns the type for a card's name (``HL-225B``, ``GAUDI2``, ``HL-325L``); None for other names."""
    text = name.upper()
    for kind, marks in _NAME_MARKS:
        if any(mark in text for mark in marks):
            return kind
    return None


_NAME_MARKS: tuple[tuple[DeviceType, tuple[str, ...]], ...] = (
    ("gaudi3", ("GAUDI3", "HL-325", "HL-328", "HL-388", "HL-338")),
    ("gaudi2", ("GAUDI2", "HL-225", "HL-228", "HL-288")),
    ("gaudi", ("GAUDI", "HL-205", "HL-200", "HL-202")),
)


def device_type_of_pci(device: str) -> DeviceType | None:
    """Returns the type for a PCI device number (``0x1020``); None for other numbers."""
    number = device.lower().removeprefix("0x")
    if number in ("1020", "1030"):
        return "gaudi2"
    if number.startswith("106") and len(number) == 4:
        return "gaudi3"
    return "gaudi" if number in ("1000", "1001", "1010", "1011") else None


def find_cards(root: Path = Path("/"), *, hlml: Any = None) -> Inventory:
    """Returns the cards that the driver shows. Acquires none. Asks ``hl-smi``, which is a process, last.

    Args:
        root: Stands for the root of the file system.
        hlml: Stands for the module ``pyhlml``; None: the installed one, if any.
    """
    sources: tuple[Callable[[], Iterator[Card]], ...] = (
        lambda: _from_hlml(hlml or _import_hlml()),
        lambda: _from_sysfs(root),
        _from_hl_smi,
    )
    cards = next(filter(None, (tuple(cards_of()) for cards_of in sources)), ())
    busy = _open_devices(root)
    if busy is not None:
        cards = tuple(replace(card, is_busy=card.index in busy) for card in cards)
    return Inventory(tuple(sorted(cards, key=lambda card: card.index)))


def _import_hlml() -> Any:
    try:
        return importlib.import_module("pyhlml")
    except Exception:  # A broken library must not hide the other sources.
        return None


def _from_hlml(hlml: Any) -> Iterator[Card]:
    """Asks the driver's library (``libhlml.so``), which acquires no card."""
    if hlml is None:
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # It prints what it also raises.
            hlml.hlmlInit()
    except Exception:  # HLMLError: no driver, or no library.
        return
    try:
        for index in range(hlml.hlmlDeviceGetCount()):
            handle = hlml.hlmlDeviceGetHandleByIndex(index)
            kind = device_type_of(_text(hlml.hlmlDeviceGetName(handle)))
            if kind is not None:
                yield Card(index, kind, int(hlml.hlmlDeviceGetModuleID(handle)))
    finally:
        hlml.hlmlShutdown()


def _from_sysfs(root: Path) -> Iterator[Card]:
    """Reads ``/sys/class/accel/accel<N>/device`` (kernel documentation, sysfs-driver-habanalabs)."""
    for folder in sorted((root / "sys/class/accel").glob("accel[0-9]*")):
        device = folder / "device"
        if _line(device / "vendor") != VENDOR or not folder.name[5:].isdecimal():
            continue
        kind = device_type_of_pci(_line(device / "device"))
        if kind is not None:
            module = _line(device / "module_id")
            yield Card(int(folder.name[5:]), kind, int(module) if module.isdecimal() else None)


def _from_hl_smi() -> Iterator[Card]:
    path = shutil.which("hl-smi")
    if path is None:
        return
    command = [path, "-Q", ",".join(_HL_SMI_COLUMNS), "-f", "csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_HL_SMI_SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return  # No driver, or a tool that hangs: no card is known.
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) != len(_HL_SMI_COLUMNS) or not row[0].strip().isdecimal():
            continue
        index, name, module = (value.strip() for value in row)
        kind = device_type_of(name)
        if kind is not None:
            yield Card(int(index), kind, int(module) if module.isdecimal() else None)


def _open_devices(root: Path) -> frozenset[int] | None:
    """Returns the indices of cards whose device file some process has open; None unless we may see every process."""
    if os.geteuid() != 0:
        return None
    found: set[int] = set()
    for target in map(Path, _open_files(root / "proc")):
        if target.parent == Path("/dev/accel") and target.name[5:].isdecimal():
            found.add(int(target.name[5:]))
    return frozenset(found)


def _open_files(proc: Path) -> Iterator[str]:
    """Yields the open files of all processes, except those that end or close meanwhile."""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(process / "fd" / descriptor)


def _text(value: bytes | str) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # This version of the driver lacks it.
