"""Why a cache of vLLM's that nobody sealed is not used: what its files say of themselves, against what is here.

Such a directory (``~/.cache/vllm``) has no record of what it was made for but its own hashes. vLLM's hash of a launch is not
to be had without starting vLLM. What can be had is in the artifacts: versions that torch compares, sources that vLLM
compares, the ranks that there are, and where the files were made.

Sources: those of `plain_cache`; ``_verify_source_unchanged`` and ``_try_load_aot_compiled_fn`` in
vllm/compilation/decorators.py of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.wrap.adapters.found import Found
from aotgaudi.wrap.adapters.identity import Installed
from aotgaudi.wrap.explain.plain_cache import COMPILE_CACHE, Artifact, PlainCache, read_json_object

_BUNDLED = "torch._dynamo.aot_compile_types BundledAOTAutogradSerializableCallable"
_MAX_SOURCE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a cache that decides, or may decide, whether it is used.

    Attributes:
        is_miss: with it nothing is loaded; otherwise it is worth knowing.
        text: what, where, and what it means.
    """

    is_miss: bool
    text: str


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
    config = read_json_object(found.model / "config.json")
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


def _source(path: Path) -> str:
    try:
        return read_regular(path, _MAX_SOURCE_BYTES).decode()
    except (OSError, ValueError, SpecError):
        return ""
