"""How a person names entries: ``build cache --entry`` and ``explain MANIFEST ENTRY``."""

from __future__ import annotations

import pytest

from aotgaudi.cli.manifests import find_entries
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.errors import ManifestError
from aotgaudi.manifest.manifest import Manifest
from tests.workload import tiny_spec

PROMPTS = (PromptEntry(1, 16, 0), PromptEntry(1, 128, 0), PromptEntry(2, 128, 4))
DECODES = (DecodeEntry(1, 1, 1), DecodeEntry(16, 1, 1))
MANIFEST = Manifest(tiny_spec(), (*PROMPTS, *DECODES, DefragEntry(8)))
TINY = Manifest.of(tiny_spec())


NAMED: dict[tuple[str, ...], tuple[Entry, ...]] = {
    (): MANIFEST.entries,
    ("(decode, 1, 1, 1)",): DECODES[:1],
    ("decode 1 1 1",): DECODES[:1],
    (" ( DECODE,1,1 , 1 ) ",): DECODES[:1],
    (PROMPTS[1].id,): PROMPTS[1:2],
    (PROMPTS[1].id[:8].upper(),): PROMPTS[1:2],
    ("(prompt, *, 128, *)",): PROMPTS[1:],
    ("prompt * 128 [0-3]",): PROMPTS[1:2],
    ("(*, 1, 1*, *)",): (*PROMPTS[:2], DECODES[0]),
    ("(d*, ?*)",): (DefragEntry(8),),
    ("(decode, 16, 1, 1)", "(prompt, 1, *, *)", "(prompt, 1, 16, 0)"): (*PROMPTS[:2], DECODES[1]),
}


def test_entries_are_named_as_printed_by_pattern_or_by_id_and_come_in_order() -> None:
    assert {texts: find_entries(MANIFEST, texts) for texts in NAMED} == NAMED


def test_every_entry_is_found_by_what_is_printed_of_it() -> None:
    for entry in TINY.entries:
        assert entry in find_entries(TINY, (str(entry),))


def test_a_pattern_of_samplers_names_them_all() -> None:
    samplers = [entry for entry in TINY.entries if isinstance(entry, SamplerEntry)]
    (width,) = {str(entry).count(",") for entry in samplers}

    assert find_entries(TINY, (f"(sampler{', *' * width})",)) == tuple(samplers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zz", r"no entry 'zz' \(it has prompt, decode, defrag entries, e.g. \(prompt, 1, 16, 0\)\)"),
        ("(decode, 1, 1, 2)", r"no entry '\(decode, 1, 1, 2\)' \(near: \(decode, 1, 1, 1\); "),
        ("(prompt, *, 64, *)", r"no entry '\(prompt, \*, 64, \*\)' \(near: "),
        ("(prompt, *)", "no entry"),
        ("0" * 6, "no entry"),
        ("", "no entry"),
    ],
)
def test_what_names_nothing_is_one_line_with_what_is_near(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        find_entries(MANIFEST, ("(decode, 1, 1, 1)", text))

    assert "\n" not in str(caught.value)


def test_the_start_of_two_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptEntry, "id", property(lambda self: f"abcdef{self.query_len:026}"))
    manifest = Manifest(tiny_spec(), (PromptEntry(1, 16, 0), PromptEntry(1, 32, 0)))

    assert find_entries(manifest, (f"abcdef{16:026}",)) == (PromptEntry(1, 16, 0),)
    with pytest.raises(ManifestError, match="the start of 2 entries' ids: give more digits"):
        find_entries(manifest, ("ABCDEF",))
