"""The receipt: canonical, strict, and free of what two builds could disagree in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.receipt import Receipt, SealedUnit, UnitRecord, loads
from aotgaudi.digest import Digest, canonical_json
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import ManifestError

ENTRY = PromptEntry(1, 128, 0)
BLOB = str(Digest.of(b"blob"))
UNIT = "a" * 64


def make_receipt(**changes: Any) -> Receipt:
    unit = UnitRecord(
        artifact={"a.so": BLOB}, label="x", compile_seconds=1.0, max_abs_error=0.1, tolerance=0.5
    )
    values: dict[str, Any] = {
        "manifest_id": "m",
        "target": Target(backend="cpu", machine="x86_64", isa=("avx2", "fma"), flags={"-O": "2"}),
        "programs": {ENTRY.id: BLOB},
        "units": {UNIT: unit},
        "builder": {"aotgaudi": "0.1"},
    }
    return Receipt(**{**values, **changes})


def edited(**changes: Any) -> bytes:
    return canonical_json({**json.loads(make_receipt().dumps()), **changes})


def test_the_wire_form() -> None:
    assert json.loads(make_receipt().dumps()) == {
        "schema": "aotgaudi.receipt/1",
        "manifest_id": "m",
        "target": {
            "backend": "cpu",
            "machine": "x86_64",
            "isa": ["avx2", "fma"],
            "toolchain": {},
            "flags": {"-O": "2"},
        },
        "programs": {ENTRY.id: BLOB},
        "units": {UNIT: {"artifact": {"a.so": BLOB}, "tolerance": 0.5}},
        "builder": {"aotgaudi": "0.1"},
    }


def test_measurements_and_order_of_building_do_not_reach_the_bytes() -> None:
    slow = UnitRecord(
        artifact={"a.so": BLOB}, label="y", compile_seconds=9.0, max_abs_error=0.2, tolerance=0.5
    )
    other = "b" * 64

    one = make_receipt(units={UNIT: slow, other: slow})
    two = make_receipt(units={other: slow.sealed(), UNIT: make_receipt().units[UNIT]})

    assert one.dumps() == two.dumps()


def test_what_was_checked_reaches_the_bytes() -> None:
    loose = SealedUnit(artifact={"a.so": BLOB}, tolerance=0.6)

    assert make_receipt(units={UNIT: loose}).dumps() != make_receipt().dumps()


def test_missing_names_entries_without_a_program_in_order() -> None:
    others = (DecodeEntry(2, 1, 8), DecodeEntry(1, 1, 8))

    assert make_receipt().missing((others[0], ENTRY, others[1])) == others
    assert make_receipt().missing([ENTRY]) == ()


@pytest.mark.parametrize("measure", ["compile_seconds", "max_abs_error", "tolerance"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_measure_that_is_no_measure_is_refused(measure: str, value: float) -> None:
    good = {"compile_seconds": 1.0, "max_abs_error": 0.0, "tolerance": 0.0}

    with pytest.raises(ValueError, match=measure):
        UnitRecord(artifact={"a": BLOB}, label="", **{**good, measure: value})


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../up", "a/../b", "a//b", "./a", ".hidden", "a\\b", "a\x00", "a\n", "x" * 200],
)
def test_a_file_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="not a plain relative file name"):
        loads(edited(units={UNIT: {"artifact": {name: BLOB}, "tolerance": 0}}))


@pytest.mark.parametrize("name", ["unit.so", "recipes/0001.recipe", "a-b_c+d.json"])
def test_plain_names_are_taken(name: str) -> None:
    receipt = loads(edited(units={UNIT: {"artifact": {name: BLOB}, "tolerance": 0}}))

    assert list(receipt.units[UNIT].artifact) == [name]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "receipt is not JSON"),
        (b"\xff\xfe", "receipt is not JSON"),
        (b"[" * 100_000, "receipt is not JSON"),
        (b"[]", "names no schema"),
        (b"{}", "names no schema"),
        (edited(schema="aotgaudi.receipt/2"), "has schema 'aotgaudi.receipt/2'; this aotgaudi reads"),
        (edited(surprise=1), r"surprise: Extra inputs"),
        (edited(manifest_id=7), "manifest_id: Input should be a valid string"),
        (edited(programs={"short": BLOB}), "programs.short"),
        (edited(programs={ENTRY.id: "sha256:00:1"}), f"programs.{ENTRY.id}: not a digest"),
        (edited(programs={ENTRY.id: BLOB + "x"}), "not a digest"),
        (edited(programs={ENTRY.id: BLOB.replace(":4", ":04")}), "not a digest in canonical form"),
        (edited(units={UNIT: {"artifact": {}, "tolerance": 0}}), f"units.{UNIT}.artifact"),
        (edited(units={UNIT: {"artifact": {"a": BLOB}, "tolerance": "0"}}), "tolerance"),
        (edited(units={UNIT: {"artifact": {"a": BLOB}, "tolerance": 0, "seconds": 1}}), "seconds"),
        (edited(units={UNIT + "\n": {"artifact": {"a": BLOB}, "tolerance": 0}}), "units"),
        (edited(target={"backend": "tpu", "machine": ""}), "target.backend"),
        (make_receipt().dumps() + b"\n", "not in canonical form"),
        (
            make_receipt().dumps().replace(b'{"builder"', b'{"manifest_id":"m","builder"'),
            "not in canonical form",
        ),
        (make_receipt().dumps().replace(b'"schema"', b'"schema_"'), "names no schema"),
    ],
)
def test_a_malformed_receipt_is_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        loads(data)
    assert str(caught.value).startswith("receipt")
    assert "\n" not in str(caught.value)


def test_a_bound_model_is_part_of_the_wire_form_and_absent_where_none_is_bound() -> None:
    bound = make_receipt(model={"config.json": BLOB, "model-00001-of-00002.safetensors": BLOB})

    assert json.loads(bound.dumps()) == {
        **json.loads(make_receipt().dumps()),
        "model": {"config.json": BLOB, "model-00001-of-00002.safetensors": BLOB},
    }
    assert loads(bound.dumps()) == bound
    assert make_receipt().model is None
    assert b"model" not in make_receipt().dumps()


@pytest.mark.parametrize("model", [{}, None, {"../config.json": BLOB}, {"config.json": "sha256:ab"}, []])
def test_a_model_that_is_none_is_refused(model: object) -> None:
    with pytest.raises(ManifestError):
        loads(edited(model=model))
