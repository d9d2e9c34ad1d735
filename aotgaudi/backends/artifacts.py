"""What artifacts say of themselves, device by device. Imports no torch, and loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from aotgaudi.digest import Digest

Read = Callable[[Digest], bytes]


def unit_problem(
    backend: str,
    artifact: Mapping[str, Digest],
    layouts: Iterable[str],
    arity: tuple[int, int],
    read: Read,
) -> str | None:
    """Returns why a server of `backend` could not load a unit that its program gives `arity` inputs and outputs, or None.

    `read` returns the bytes of an intact object of the artifact.
    """
    if backend == "cpu":
        from aotgaudi.backends.inductor import interface

        name, known, arity_of = interface.ARTIFACT_FILE, interface.LAYOUTS, interface.arity_of
    elif backend == "hpu":
        from aotgaudi.backends.hpu import artifact as unit

        name, known, arity_of = unit.TEXT_FILE, frozenset(), unit.arity_of
    else:
        return None
    if name not in artifact:
        return f"has no file {name}"
    unknown = sorted({*layouts} - known)
    if unknown:
        return f"takes a weight in the layout {unknown[0]!r}, which is not known here"
    own = arity_of(read(artifact[name]))
    if own is not None and own != arity:
        return f"has {own[0]} inputs and {own[1]} outputs, the program gives it {arity[0]} and {arity[1]}"
    return None
