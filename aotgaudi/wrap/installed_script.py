"""A script for a server's interpreter: prints as JSON what is installed there, from metadata alone.

It uses the standard library only and runs on Python 3.9 and later. No module imports it: its text is given to ``python -I
-c``, with the question (see `starts.question_of`) as the only argument.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
from importlib.machinery import PathFinder
from urllib.parse import unquote

_OF_INSTALLER = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_SUFFIX, _EGG, _LINK = ".dist-info", ".egg-info", ".egg-link"
_CUSTOM = ("sitecustomize", "usercustomize")
"""Modules that every interpreter imports if they exist (site.py)."""
STARTUP_EXCLUDED = {
    "distutils-precedence.pth": "setuptools puts its distutils first",
    "_virtualenv.pth": "virtualenv's patch of distutils",
    "*-nspkg.pth": "namespaces of packages",
    "__editable__*": "an editable install, which counts by its sources",
}


def normalised(name: str) -> str:
    """Returns the name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def of_record(data: bytes) -> str:
    """Returns the sha256 over the sorted lines of a RECORD that do not depend on where it is installed."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return hashlib.sha256(
        b"\n".join(sorted(line for line in lines if line and not _is_of_place(line)))
    ).hexdigest()


def _is_of_place(line: bytes) -> bool:
    path = line.rsplit(b",", 2)[0].strip(b'"').decode("utf-8", "surrogateescape")
    is_script = path.startswith(("../", "/"))
    is_installers = _SUFFIX + "/" in path and path.rpartition("/")[2] in _OF_INSTALLER
    return is_script or is_installers or path.endswith(".pyc")


def of_sources(folder: str) -> str:
    """Returns the sha256 over the names and contents of all ``.py`` files below a folder."""
    state = hashlib.sha256()
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(file for file in files if file.endswith(".py")):
            path = os.path.join(at, name)
            inner = hashlib.sha256(_read(path)).hexdigest()
            line = f"{os.path.relpath(path, folder)} {inner}\n"
            state.update(line.encode("utf-8", "surrogateescape"))
    return state.hexdigest()


def _linked(path: str, entry: str) -> str:
    """Returns the metadata directory to which a link of ``setup.py develop`` leads."""
    folder = _read(os.path.join(path, entry)).partition(b"\n")[0].decode("utf-8", "surrogateescape").strip()
    return os.path.join(folder, entry[: -len(_LINK)].replace("-", "_") + _EGG)


def _identity(info: str, name: str, version: str) -> str:
    """Returns a distribution's version with the digest of its RECORD, or of its sources if they are used in place."""
    if info.endswith(_EGG):
        return _of_egg(info)
    root = _editable_root(info)
    if root is not None:
        return f"{version} in place {of_sources(_package_of(root, name))}"
    record = _read(os.path.join(info, "RECORD"))
    return f"{version} {of_record(record)}" if record else f"{version} without RECORD"


def _of_egg(info: str) -> str:
    """Returns the version in an egg's metadata with the digest of its modules, because an egg has no RECORD."""
    metadata = _read(os.path.join(info, "PKG-INFO")).decode("utf-8", "replace")
    found = re.search(r"^Version: *(.+)$", metadata, re.MULTILINE)
    modules = _read(os.path.join(info, "top_level.txt")).decode("utf-8", "replace").split()
    digests = [_of_module(os.path.dirname(info), module) for module in sorted(modules)]
    return f"{found[1].strip() if found else 'of no version'} {_joined(digests)}"


def _of_module(folder: str, module: str) -> str:
    """Returns the digest of a module's or a package's sources in a folder; the digest of nothing if they are missing."""
    path = os.path.join(folder, module)
    return of_sources(path) if os.path.isdir(path) else hashlib.sha256(_read(path + ".py")).hexdigest()


def _joined(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def _startup(paths: list[str], sites: list[str]) -> dict[str, str]:
    """Returns the code that every interpreter runs at startup, by its file: customisations, and lines of ``.pth`` files."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        entries = _entries(path)
        for name in _CUSTOM:
            if name in entries or f"{name}.py" in entries:
                found.setdefault(f"startup {name}", _of_module(path, name))
    for path in dict.fromkeys(sites):
        for entry in _entries(path):
            is_known = any(fnmatch.fnmatchcase(entry, pattern) for pattern in STARTUP_EXCLUDED)
            if entry.endswith(".pth") and not is_known:
                text = _read(os.path.join(path, entry)).decode("utf-8", "surrogateescape")
                lines = [line for line in text.splitlines() if re.match(r"import[ \t]", line)]
                modules = re.findall(r"\b(?:import|from) +(\w+)", "\n".join(lines))
                sources = [_of_module(path, module) for module in sorted(set(modules))]
                if lines:
                    found.setdefault(f"startup {entry}", _joined([*lines, *sources]))
    return found


def _editable_root(info: str) -> str | None:
    """Returns where the sources of an editable install lie (PEP 610); None for any other install."""
    try:
        said = json.loads(_read(os.path.join(info, "direct_url.json")))
        is_editable, url = said["dir_info"]["editable"], said["url"]
    except (KeyError, TypeError, ValueError):
        return None
    return unquote(url[len("file://") :]) if is_editable and url.startswith("file://") else None


def _package_of(root: str, name: str) -> str:
    folders = [os.path.join(root, inner, name.replace("-", "_")) for inner in ("", "src")]
    return next((folder for folder in folders if os.path.isdir(folder)), root)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _distributions(
    paths: list[str], patterns: list[str], groups: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the identities of the distributions that count, and all names. The first of a name on the path wins."""
    found, names = {}, set()
    plugins = re.compile(rf"^\[({'|'.join(groups)})\.".encode(), re.MULTILINE)
    for path in dict.fromkeys(paths):
        for entry in _entries(path):
            if not entry.endswith((_SUFFIX, _EGG, _LINK)):
                continue
            name, _, version = entry.rpartition(".")[0].partition("-")
            name = normalised(name)
            if name in names:
                continue
            names.add(name)
            info = os.path.join(path, entry) if entry[-len(_LINK) :] != _LINK else _linked(path, entry)
            is_plugin = plugins.search(_read(os.path.join(info, "entry_points.txt")))
            if is_plugin or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                found[name] = _identity(info, name, version)
    return found, sorted(names)


def _sources(paths: list[str], packages: list[str]) -> dict[str, str]:
    """Returns the packages whose sources lie in directories that come before the installed ones."""
    found: dict[str, str] = {}
    for path in paths:
        entries = _entries(path)
        for name in packages:
            is_installed = any(one.startswith(name) and one.endswith((_SUFFIX, _EGG)) for one in entries)
            if not is_installed and os.path.isfile(os.path.join(path, name, "__init__.py")):
                found.setdefault(f"sources of {name}", of_sources(os.path.join(path, name)))
    return found


def _user_site(home: str) -> list[str]:
    """Returns the user's site, which an interpreter outside a virtual environment searches."""
    if not home or sys.prefix != sys.base_prefix:
        return []
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return [os.path.join(home, ".local", "lib", version, "site-packages")]


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (AttributeError, ValueError):
        return "unknown"


def answer(question: dict[str, object]) -> dict[str, object]:
    """Returns what is installed; see `launch_machine.Installed`."""
    ahead, patterns, packages, groups = (
        [str(one) for one in question[name]]  # type: ignore[attr-defined]
        for name in ("ahead", "patterns", "packages", "groups")
    )
    paths = [*ahead, *_user_site(str(question["home"])), *filter(None, sys.path)]
    found, names = _distributions(paths, patterns, groups)
    sites = [*_user_site(str(question["home"])), *site.getsitepackages(), sysconfig.get_path("purelib")]
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return {
        "python": f"{'.'.join(map(str, sys.version_info[:3]))} {abi}",
        "libc": _libc(),
        "prefix": sys.prefix,
        "site_packages": sysconfig.get_path("purelib"),
        "distributions": {**found, **_sources(ahead, packages), **_startup(paths, sites)},
        "names": names,
        "missing": [
            name
            for name in packages
            if not any(one.startswith(normalised(name)) for one in names)
            and not (PathFinder.find_spec(name, paths) or importlib.util.find_spec(name))
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))))
