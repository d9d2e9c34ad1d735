"""Where something came from, in few words; and words that must not be written down."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_INTERMEDIARIES = frozenset(
    {_PACKAGE, "subprocess", "multiprocessing", "contextlib", "functools", "importlib", "os", "threading"}
)
_INNERMOST, _OTHERS, _DEEPEST = 6, 6, 400
_COMPILERS = frozenset({"torch", "triton", "numba", "sympy", "tilelang", "deep_gemm"})

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_?KEY(_ID)?|PRIVATE_?KEY|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|BEARER)(_|$)"
    r"|(^|_)(TOKEN|KEY)$"
)
_ARGUMENT_CHARACTERS = 160


def stack_of(frame: FrameType | None = None) -> list[str]:
    """Returns ``module:line function`` for the frames that say most, the innermost first.

    These are the innermost ones, and of those further out the ones that are not a compiler's own: the server's.
    """
    if frame is None:
        frame = sys._getframe(1)
    told: list[str] = []
    num_others = 0
    for _ in range(_DEEPEST):
        if frame is None or num_others == _OTHERS:
            break
        module = str(frame.f_globals.get("__name__") or frame.f_code.co_filename)
        top = module.partition(".")[0]
        if top not in _INTERMEDIARIES:
            if len(told) - num_others < _INNERMOST:
                told.append(_told(module, frame))
            elif top not in _COMPILERS:
                told.append(_told(module, frame))
                num_others += 1
        frame = frame.f_back
    return told


def _told(module: str, frame: FrameType) -> str:
    return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds something that must not be written down.

    The rule is that of a launch's key (`aotgaudi.commands.variables.is_secret`); a test compares the two.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_SECRET.search(words.replace("-", "_").replace(".", "_").upper()))


def _short(text: str) -> str:
    """Cuts a long word in its middle: of a path the end says most."""
    if len(text) <= _ARGUMENT_CHARACTERS:
        return text
    return f"{text[:40]}...{text[43 - _ARGUMENT_CHARACTERS :]}"


def told_arguments(argv: Sequence[object]) -> list[str]:
    """Returns a command line as it may be written down: secrets left out, long words cut."""
    told: list[str] = []
    is_value_secret = False
    for word in argv:
        text = word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)
        name, separator, _ = text.partition("=")
        is_flag = text.startswith("-")
        if is_value_secret and not is_flag:
            text = "***"
        elif separator and (is_flag or name.isidentifier()) and is_secret(name):
            text = f"{name}=***"
        if is_flag:  # Some flags take several values.
            is_value_secret = not separator and is_secret(text)
        told.append(_short(text))
    return told
