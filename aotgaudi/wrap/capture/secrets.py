"""Secrets that a build was given must not be in what it seals: a bundle goes to registries, and to everybody's pods.

A secret is the value of a variable, or of a flag, that is one by its name (guests/variables.py). Files are searched for the
bytes of the value, and for the forms in which programs write text down: escaped as in JSON, in Python's source, in a URL,
and in base64 at each of its three alignments. What is compressed or encrypted cannot be searched. The documents of the
bundle are searched as the files are: a launch has the command's words, a receipt what the server hashed.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aotgaudi.errors import CaptureError
from aotgaudi.wrap.adapters.variables import is_secret, is_secret_key, secret_values

MIN_SECRET_BYTES = 6
"""Shorter values are in many files by chance."""
_MIN_ENCODED_BYTES = 9
"""Of base64, of which the ends depend on what is around it."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that nobody may read, and the `name` of the variable or flag that has it."""

    name: str
    value: str = field(repr=False)

    @property
    def is_searched(self) -> bool:
        """Whether it is long enough to be told from chance."""
        return len(self.value.encode("utf-8", "surrogateescape")) >= MIN_SECRET_BYTES

    def forms(self) -> frozenset[bytes]:
        """Returns the bytes that would betray it."""
        texts = {self.value, json.dumps(self.value)[1:-1], json.dumps(self.value, ensure_ascii=False)[1:-1]}
        texts |= {
            repr(self.value)[1:-1],
            urllib.parse.quote(self.value, safe=""),
            urllib.parse.quote(self.value),
        }
        return frozenset(text.encode("utf-8", "surrogateescape") for text in texts) | frozenset(
            self._encoded()
        )

    def _encoded(self) -> Iterator[bytes]:
        """In base64 a byte's characters depend on where it stands in a group of three: the whole groups of each case."""
        data = self.value.encode("utf-8", "surrogateescape")
        for skipped in range(3):
            whole = data[skipped : len(data) - (len(data) - skipped) % 3]
            if len(whole) >= _MIN_ENCODED_BYTES:
                yield base64.b64encode(whole)
                yield base64.urlsafe_b64encode(whole)


def require_public(data: bytes, noun: str, secrets: Iterable[Secret]) -> None:
    """Raises CaptureError, which names them, where a document that is to be sealed holds secrets; `noun` is what it is."""
    held = sorted(
        {one.name for one in secrets if one.is_searched and any(form in data for form in one.forms())}
    )
    if held:
        raise CaptureError(
            f"the {noun} holds the value of {', '.join(held)}, a secret: whoever has the bundle could read it"
            " (keep it out of the command, and of variables that are not named like secrets)"
        )


def secrets_of(
    environ: Mapping[str, str], words: Sequence[str], public_words: Iterable[str]
) -> tuple[Secret, ...]:
    """Returns the secrets of an environment, and of a command of which `public_words` are no secrets; by name, each once."""
    found = dict(secret_values(environ))
    for name, value in _of_words(words, frozenset(public_words)):
        found.setdefault(name, value)
    return tuple(Secret(name, value) for name, value in sorted(found.items()) if value)


def _of_words(words: Sequence[str], public: frozenset[str]) -> Iterator[tuple[str, str]]:
    """What stands in the words of a command that are not for everybody."""
    flag = ""
    for word in words:
        is_flag = word.startswith("-")
        if is_flag:
            flag = word.partition("=")[0]
        if word in public:
            continue
        name, is_assigned, value = word.partition("=")
        if is_assigned and (is_flag or is_secret(name)):
            yield name, value
        elif not is_flag:
            yield flag or "a word of the command", word
        yield from ((f"{flag} {key}", text) for key, text in _of_table(value or word))


def _of_table(text: str) -> Iterator[tuple[str, str]]:
    """The values of a table in JSON whose keys say that they are secrets."""
    if not text.startswith(("{", "[")):
        return
    try:
        pending = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((key, item) for item in value)
        elif isinstance(value, str) and is_secret_key(key):
            yield key, value
