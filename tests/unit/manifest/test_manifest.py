from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.entries import (
    DecodeEntry,
    DefragEntry,
    Entry,
    MhcEntry,
    PromptEntry,
    SamplerEntry,
    UnifiedEntry,
    VisionEntry,
)
from aotgaudi.errors import ManifestError
from aotgaudi.manifest.manifest import Manifest, dumps, loads, read_manifest, write_manifest
from aotgaudi.manifest.schema import schema_files
from aotgaudi.spec.parse import spec_from_json
from tests.specs import spec_of

DOCS = Path(__file__).parents[3] / "docs"
SPEC = spec_of(config={"eps": 1e-5, "x": {"b": 1, "a": 2}})
MANIFEST = Manifest.of(SPEC)
DATA = dumps(MANIFEST)
NUM_PROMPTS = len(MANIFEST.of_kind("prompt"))


def sizes(low: int = 1) -> st.SearchStrategy[int]:
    return st.integers(low, 2**31 - 1)


def entries_of_all_kinds() -> st.SearchStrategy[tuple[Entry, ...]]:
    number = st.floats(allow_nan=False, allow_infinity=False)
    rows = (
        st.builds(PromptEntry, sizes(), sizes(), sizes(0)),
        st.builds(DecodeEntry, sizes(), sizes(), sizes()),
        st.builds(UnifiedEntry, sizes(), sizes(0), sizes(0), st.booleans()),
        st.builds(VisionEntry, sizes(), st.booleans()),
        st.builds(
            SamplerEntry,
            sizes(0),
            number,
            number,
            sizes(0),
            st.booleans(),
            *[number] * 4,
            sizes(0),
            st.booleans(),
            st.just(0.0) | number.map(abs),
        ),
        st.builds(DefragEntry, sizes()),
        st.builds(MhcEntry, sizes(), sizes(), st.sampled_from(["attn", "ffn"])),
    )
    lists = (st.lists(kind, max_size=3, unique=True) for kind in rows)
    return st.tuples(*lists).map(lambda kinds: tuple(entry for kind in kinds for entry in kind))


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(DATA), **changes}).encode()


def test_file_form_survives_and_is_deterministic() -> None:
    assert loads(DATA) == MANIFEST
    assert dumps(loads(DATA)) == DATA
    assert dumps(Manifest.of(SPEC)) == DATA


def test_each_entry_has_a_line_of_its_own() -> None:
    lines = DATA.decode().splitlines()

    assert lines.count("        [1, 16, 0],") == 1
    assert sum(line.startswith("        [") for line in lines) == len(MANIFEST.entries)
    assert DATA.endswith(b"}\n")


def canonical_id(data: bytes) -> str:
    """The id by its definition: sha256 of the RFC 8785 form of the file's content without the id."""
    content = json.loads(data)
    del content["id"]
    return hashlib.sha256(rfc8785.dumps(content)).hexdigest()


@given(entries_of_all_kinds())
def test_any_manifest_survives_its_file_and_has_the_id_of_its_canonical_content(
    entries: tuple[Entry, ...],
) -> None:
    manifest = Manifest(SPEC, entries)
    data = dumps(manifest)

    assert loads(data) == manifest
    assert json.loads(data)["id"] == manifest.id == canonical_id(data)
    for kind, table in json.loads(data)["entries"].items():
        assert table["rows"] == [list(entry.row()) for entry in manifest.of_kind(kind)]


def test_manifest_of_many_rows_survives_its_file_and_has_the_id_of_its_canonical_content() -> None:
    """More rows than are hashed and written at a time."""
    entries = tuple(PromptEntry(1, 1 + index, index) for index in range(25_000))
    data = dumps(Manifest(SPEC, entries))

    assert loads(data).entries == entries
    assert json.loads(data)["id"] == canonical_id(data)
    assert data.count(b"\n        [") == 25_000


def test_id_is_pinned() -> None:
    """A change of this id is a change of the format, or of a default: say so in the change."""
    assert MANIFEST.id == "8ee83b781c2e6e4a1ad85a8ad16ed9d217cebc2b361a6d2fc7446696f4c4be2b"


def test_formatting_and_key_order_do_not_matter() -> None:
    turned = json.dumps(dict(reversed(json.loads(DATA).items())), indent=7).encode()

    assert loads(turned) == MANIFEST


@given(st.randoms(use_true_random=False))
def test_id_does_not_depend_on_the_order_of_config_keys(random: Any) -> None:
    value = SPEC.to_json()
    keys = list(value["model"]["config"])
    random.shuffle(keys)
    value["model"]["config"] = {key: value["model"]["config"][key] for key in keys}

    shuffled = Manifest.of(spec_from_json(value))

    assert shuffled.id == MANIFEST.id
    assert dumps(shuffled) == DATA


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks"])
def test_id_changes_with_the_limits(name: str) -> None:
    value = SPEC.to_json()
    value["limits"][name] += 1

    assert Manifest.of(spec_from_json(value)).id != MANIFEST.id


def with_row(kind: str, row: list[Any]) -> bytes:
    content = json.loads(DATA)
    content["entries"][kind]["rows"].append(row)
    return json.dumps(content).encode()


GREEDY_ROW = [9, 0.0, 1.0, 0, True, 0.0, 0.0, 0.0, 1.0, 0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "should be an object"),
        (edited(id="0" * 64), f"id: is {'0' * 64}, but the content hashes to {MANIFEST.id}"),
        (edited(id=MANIFEST.id.upper()), "id: is"),
        (
            edited(schema="aotgaudi.manifest/1", note=1),
            "schema: is 'aotgaudi.manifest/1' (should be 'aotgaudi.manifest/2')",
        ),
        (edited(note=1), "note: unknown key (known here: entries, id, schema, spec)"),
        (edited(spec={}), "spec.schema: is missing"),
        (edited(entries={}), "entries.prompt: is missing"),
        (with_row("prompt", [1, 48, 0]), "the content hashes to"),
        (with_row("prompt", [1, 16, 0]), "entries: an entry occurs twice"),
        (with_row("prompt", [1, 16.5, 0]), f"entries.prompt.rows.{NUM_PROMPTS}.1: is 16.5"),
        (with_row("prompt", [1, True, 0]), f"entries.prompt.rows.{NUM_PROMPTS}.1: is True"),
        (with_row("prompt", [0, 16, 0]), f"entries.prompt.rows.{NUM_PROMPTS}.0: is 0"),
        (with_row("prompt", [1, 16]), f"entries.prompt.rows.{NUM_PROMPTS}.2: is missing"),
        (with_row("sampler", [1, 0.0, 1.0, 0, 1]), "entries.sampler.rows.36.4: is 1"),
        (with_row("sampler", [*GREEDY_ROW, False]), "entries.sampler.rows.36.10: is False"),
        (with_row("sampler", [*GREEDY_ROW, True, 0.0]), "entries.sampler.rows.36.11: is 0.0"),
        (with_row("sampler", [*GREEDY_ROW, True, 1.0, 1]), "entries.sampler.rows.36"),
        (DATA.replace(b'"query_len", ', b'"length", ', 1), "entries.prompt.columns.1: is 'length'"),
        (DATA.replace(b'"max_num_seqs": 2', b'"max_num_seqs": 3'), "the content hashes to"),
        (DATA.replace(b'"num_blocks": 24', b'"num_blocks": 2'), "spec.limits.num_blocks: is 2, too few"),
        (DATA.replace(b"1e-05", b"1e999"), "spec.model.config.eps: "),
        (DATA.replace(b'"threshold": 32', b'"threshold": NaN'), "spec.defrag.threshold: is nan"),
    ],
)
def test_anything_else_is_refused_with_its_place(data: bytes, expected: str) -> None:
    with pytest.raises(ManifestError) as caught:
        loads(data)

    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(position: int, byte: int) -> None:
    damaged = DATA[:position] + bytes([byte]) + DATA[position + 1 :]
    with contextlib.suppress(ManifestError):
        assert loads(damaged) == MANIFEST


@given(st.binary(max_size=200))
def test_no_bytes_give_anything_but_a_manifest_error(data: bytes) -> None:
    with pytest.raises(ManifestError):
        loads(data)


def test_files_are_written_and_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.manifest.json"
    write_manifest(path, MANIFEST)
    assert path.read_bytes() == DATA
    assert read_manifest(path) == MANIFEST

    path.write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r"x\.manifest\.json: schema: is missing"):
        read_manifest(path)
    with pytest.raises(ManifestError, match=r"absent\.json: cannot be read: No such file"):
        read_manifest(tmp_path / "absent.json")


def test_entries_must_be_grouped_by_kind_and_distinct() -> None:
    with pytest.raises(ValueError, match="grouped"):
        Manifest(SPEC, (DecodeEntry(1, 1, 1), PromptEntry(1, 16, 0)))
    with pytest.raises(ValueError, match="twice"):
        Manifest(SPEC, (PromptEntry(1, 16, 0), PromptEntry(1, 16, 0)))


@pytest.mark.parametrize("name", schema_files())
def test_committed_json_schema_is_up_to_date(name: str) -> None:
    """Mend with ``python -m aotgaudi.manifest.schema docs``."""
    assert (DOCS / name).read_bytes() == schema_files()[name]
