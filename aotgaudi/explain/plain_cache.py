"""Why a cache of vLLM's that nobody sealed is not used: what its files say of themselves, against what is here.

Such a directory (``~/.cache/vllm``) has no record of what it was made for but its own hashes. vLLM's hash of a launch is not
to be had without starting vLLM. What can be had is in the artifacts: versions that torch compares, sources that vLLM
compares, the ranks that there are, and where the files were made. Nothing is unpickled, imported or written.

Sources: vllm/compilation/decorators.py (``torch_aot_compile/HASH/rank_R_D/model``, ``_verify_source_unchanged``,
``_try_load_aot_compiled_fn``) and vllm/compilation/backends.py (``HASH/rank_R_D/PREFIX/cache_key_factors.json``) of vLLM
0.32; torch/_dynamo/aot_compile.py and package.py of torch 2.13 (``SystemInfo``, ``SourceInfo``).
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from aotgaudi.errors import SpecError
from aotgaudi.explain.pickle_strings import MAX_BYTES, PickleStrings, read_pickle_strings
from aotgaudi.guests.found import Found
from aotgaudi.guests.identity import Installed
from aotgaudi.regularfile import read_regular

COMPILE_CACHE = "torch_compile_cache"
_AOT = "torch_aot_compile"
_MODEL_INFOS = "modelinfos"
_FACTORS = "cache_key_factors.json"
_RANK = re.compile(r"rank_(\d+)_(\d+)")
_HASH = re.compile(r"[0-9a-f]{10,64}")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?[\w.+-]*")
_MODULE = re.compile(r"\w+(\.\w+)*")
_PLACE = re.compile(r"(/[^\s'\"\0]{1,400})/torch_compile_cache/torch_aot_compile/[0-9a-f]{64}")
_SITE = re.compile(r"(/[^\s'\"\0]{1,400}/site-packages)/(?:vllm|torch)/")
_BUNDLED = "torch._dynamo.aot_compile_types BundledAOTAutogradSerializableCallable"
_MAX_SOURCE_BYTES = 4 << 20
_MAX_FILES = 200_000


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a cache that decides, or may decide, whether it is used.

    Attributes:
        is_miss: with it nothing is loaded; otherwise it is worth knowing.
        text: what, where, and what it means.
    """

    is_miss: bool
    text: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """One saved model of one rank.

    Attributes:
        path: of the file.
        hash: vLLM's hash, the directory's name.
        rank: which rank it is for.
        size_bytes: of the file.
        strings: what it says.
    """

    path: Path
    hash: str
    rank: int
    size_bytes: int
    strings: PickleStrings

    @property
    def torch(self) -> str | None:
        """The version of torch that made it."""
        return self._version("torch_version")

    @property
    def python(self) -> str | None:
        """The version of Python that made it."""
        return self._version("python_version")

    @property
    def place(self) -> str | None:
        """The cache's directory when it was made."""
        return _first(_PLACE, self.strings.texts)

    @property
    def site_packages(self) -> str | None:
        """Where the packages lay that were traced."""
        return _first(_SITE, self.strings.texts)

    @property
    def sources(self) -> Mapping[str, str]:
        """The modules that were traced, each with the text that its file had (``SourceInfo.inlined_sources``)."""
        texts = self.strings.texts
        start = texts.index("inlined_sources") if "inlined_sources" in texts else len(texts)
        found: dict[str, str] = {}
        module = ""
        for key, value in itertools.pairwise(texts[start:]):
            if key == "module" and _MODULE.fullmatch(value):
                module = value
            elif key == "content" and module:
                found[module] = value
                module = ""
        return found

    def _version(self, key: str) -> str | None:
        """Returns the version that soon follows a member of ``SystemInfo``; torch's is an object of a class of its own."""
        texts = self.strings.texts
        start = texts.index(key) if key in texts else len(texts)
        return next((text for text in texts[start + 1 : start + 4] if _VERSION.fullmatch(text)), None)


@dataclass(frozen=True, slots=True)
class PlainCache:
    """A cache of vLLM's, read.

    Attributes:
        path: of ``VLLM_CACHE_ROOT``.
        num_files: in its compile cache.
        num_bytes: of these.
        artifacts: saved models, by path.
        factors: ``cache_key_factors.json`` of older or other ways to compile, by path.
        architectures: of the models that were served from it.
        is_open: others than its owner may write to it.
    """

    path: Path
    num_files: int
    num_bytes: int
    artifacts: tuple[Artifact, ...]
    factors: Mapping[Path, Mapping[str, Any]]
    architectures: tuple[str, ...]
    is_open: bool


def find_plain_cache(path: Path) -> Path | None:
    """Returns the cache root at `path`, or around it if that is a directory within one; None if there is none."""
    for candidate in (path, *path.parents[:3]):
        if (candidate / COMPILE_CACHE).is_dir() or (candidate / _MODEL_INFOS).is_dir():
            return candidate
    return None


def read_plain_cache(path: Path) -> PlainCache:
    """Reads the cache whose root is `path`. Raises SpecError where it cannot be read."""
    try:
        files = [(file, file.lstat()) for file in _files(path / COMPILE_CACHE)]
        artifacts = tuple(_artifact(file) for file, _ in files if _is_artifact(file))
        factors = {file: _json(file) for file, _ in files if file.name == _FACTORS}
        infos = sorted((path / _MODEL_INFOS).glob("*.json"))
        is_open = bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    return PlainCache(
        path=path,
        num_files=len(files),
        num_bytes=sum(status.st_size for _, status in files),
        artifacts=artifacts,
        factors=factors,
        architectures=tuple(dict.fromkeys(filter(None, map(_architecture, infos)))),
        is_open=is_open,
    )


def examine(cache: PlainCache, found: Found | None = None) -> tuple[Finding, ...]:
    """Returns what is to be said of a cache, for a command if there is one; what makes it miss comes first."""
    findings = [*_of_itself(cache)]
    if found is not None:
        findings += [*_of_command(cache, found), *_of_factors(cache, found.environ)]
    return tuple(sorted(findings, key=lambda finding: not finding.is_miss))


def _of_itself(cache: PlainCache) -> Iterator[Finding]:
    if not cache.artifacts and not cache.factors:
        yield Finding(
            True, f"no compiled model is in {cache.path / COMPILE_CACHE}: nothing was ever saved here"
        )
    for artifact in cache.artifacts:
        if not artifact.size_bytes:
            yield Finding(True, f"{artifact.path} is empty: whoever wrote it was stopped; remove it")
        elif not artifact.strings.is_whole:
            yield Finding(True, f"{artifact.path} is cut off, or damaged: remove it")
    if cache.is_open:
        text = f"others may write to {cache.path}: what it holds is code, and they decide what a server runs"
        yield Finding(False, text)


def _of_command(cache: PlainCache, found: Found) -> Iterator[Finding]:
    installed = found.installed
    where = _cache_root(found.environ)
    if where.resolve() != cache.path.resolve():
        yield Finding(True, f"this command looks in {where}, not in {cache.path} (VLLM_CACHE_ROOT)")
    yield from _of_ranks(cache, found)
    yield from _of_model(cache, found)
    for artifact in cache.artifacts:
        yield from _of_artifact(artifact, cache, installed)
    if cache.artifacts:
        text = (
            "vLLM's hash of this launch also holds the model's path, and some 240 variables: start it to know"
        )
        yield Finding(False, f"{text}, or wrap it: aotgaudi build capture -o DIR -- COMMAND")


def _of_artifact(artifact: Artifact, cache: PlainCache, installed: Installed) -> Iterator[Finding]:
    name = f"{artifact.hash[:10]}/rank {artifact.rank}"
    torch, python = installed.distributions.get("torch", "").split(" ")[0], installed.python.split(" ")[0]
    if artifact.torch is not None and torch and artifact.torch != torch:
        yield Finding(True, f"{name} was made by torch {artifact.torch}, here is {torch}: torch refuses it")
    if artifact.python is not None and artifact.python != python:
        yield Finding(
            True, f"{name} was made by Python {artifact.python}, here is {python}: torch refuses it"
        )
    site = Path(installed.site_packages)
    for module in _changed(artifact.sources, site):
        yield Finding(
            True, f"{name} was traced from another {module}: vLLM compares it, and generates all anew"
        )
    if _BUNDLED in artifact.strings.names and _cannot_load_bundled(site):
        yield Finding(
            True,
            f"{name} is of a kind that this vLLM saves and cannot load: every start generates it again, without a compiler"
            " (aotgaudi mends that: vllm.finalize-loading)",
        )
    if artifact.place is not None and Path(artifact.place) != cache.path.resolve():
        yield Finding(
            False, f"{name} was made in {artifact.place}: where kernels are Triton's, they are not found here"
        )
    if artifact.site_packages is not None and artifact.site_packages != installed.site_packages:
        text = f"{name} was made from {artifact.site_packages}, this vLLM is in {installed.site_packages}"
        yield Finding(False, text)


def _of_ranks(cache: PlainCache, found: Found) -> Iterator[Finding]:
    world = found.flags.world
    wanted = world.get("tensor_parallel", 1) * world.get("pipeline_parallel", 1)
    by_hash: dict[str, set[int]] = {}
    for artifact in cache.artifacts:
        by_hash.setdefault(artifact.hash, set()).add(artifact.rank)
    if by_hash and not any(ranks >= set(range(wanted)) for ranks in by_hash.values()):
        most = max(map(len, by_hash.values()))
        yield Finding(True, f"this command has {wanted} ranks, the artifacts are for {most} at most")


def _of_model(cache: PlainCache, found: Found) -> Iterator[Finding]:
    config = _json(found.model / "config.json")
    wanted = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if wanted and cache.architectures and not set(wanted) & set(cache.architectures):
        served = ", ".join(cache.architectures)
        yield Finding(True, f"this command serves {wanted[0]}; served from this cache was {served}")


def _of_factors(cache: PlainCache, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the variables that are set otherwise than where vLLM wrote down what it hashed."""
    for path, document in cache.factors.items():
        hashed = document.get("env")
        for name, value in hashed.items() if isinstance(hashed, dict) else ():
            if name in environ and not _is_as_hashed(environ[name], value):
                yield Finding(
                    True, f"{name} is {environ[name]!r}; {path.parent.name} was made with {value!r}"
                )


def _is_as_hashed(text: str, value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return (text.lower() in ("1", "true", "yes", "on")) is bool(value)
    return str(value) == text


def _cannot_load_bundled(site_packages: Path) -> bool:
    """Whether vLLM calls a method that torch's artifact lacks, by the texts of both; see guests/vllm/repairs.py."""
    caller = _source(site_packages / "vllm" / "compilation" / "decorators.py")
    kind = _source(site_packages / "torch" / "_dynamo" / "aot_compile_types.py")
    return bool(kind) and ".finalize_loading(" in caller and "finalize_loading" not in kind


def _changed(sources: Mapping[str, str], site_packages: Path) -> Iterator[str]:
    for module, text in sources.items():
        path = site_packages.joinpath(*module.split("."))
        here = _source(path.with_suffix(".py")) or _source(path / "__init__.py")
        if here and here != text:
            yield module


def _cache_root(environ: Mapping[str, str]) -> Path:
    """Returns where vLLM keeps its cache (vllm/envs.py)."""
    if environ.get("VLLM_CACHE_ROOT"):
        return Path(environ["VLLM_CACHE_ROOT"]).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/root")) / ".cache")
    return Path(cache) / "vllm"


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for at, _, names in os.walk(folder):
        for name in names:
            count += 1
            if count > _MAX_FILES:
                raise SpecError(str(folder), f"has more than {_MAX_FILES} files")
            yield Path(at, name)


def _is_artifact(path: Path) -> bool:
    rank, hashed = path.parent, path.parent.parent
    is_named = path.name == "model" and _RANK.fullmatch(rank.name) and _HASH.fullmatch(hashed.name)
    return bool(is_named) and hashed.parent.name == _AOT


def _artifact(path: Path) -> Artifact:
    rank = _RANK.fullmatch(path.parent.name)
    data = read_regular(path, MAX_BYTES)
    return Artifact(
        path, path.parent.parent.name, int(rank[1]) if rank else 0, len(data), read_pickle_strings(data)
    )


def _architecture(path: Path) -> str | None:
    info = _json(path).get("modelinfo")
    name = info.get("architecture") if isinstance(info, dict) else None
    return name if isinstance(name, str) else None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = from_json(read_regular(path, _MAX_SOURCE_BYTES))
    except (OSError, ValueError, SpecError):
        return {}
    return value if isinstance(value, dict) else {}


def _source(path: Path) -> str:
    try:
        return read_regular(path, _MAX_SOURCE_BYTES).decode()
    except (OSError, ValueError, SpecError):
        return ""


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    found = (pattern.search(text) for text in texts)
    return next((match[1] for match in found if match), None)
