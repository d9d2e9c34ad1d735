"""Why programs and units are not warm: findings, nearest builds and changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.compile.keys import ProgramKeys, ProgramRow, UnitSource
from aotgaudi.compile.why import (
    BuiltProgram,
    BuiltUnit,
    Change,
    Cost,
    Finding,
    History,
    NearestProgram,
    NearestUnit,
    changes,
    explain_against,
    reasons,
)
from aotgaudi.digest import Digest
from aotgaudi.entries import DefragEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store
from tests.unit.compile.explaining import SECONDS, built, compiled, findings
from tests.workload import FAKE, key_of, program_key, seed, text_of, tiny_spec

ENTRIES = (DefragEntry(1), DefragEntry(2))
LABELS = (("swap a", "layer b"), ("swap a", "layer c"))
UPGRADED = FAKE.model_copy(update={"toolchain": {**FAKE.toolchain, "torch": "2.14"}})


def spec_with_dtype(dtype: str) -> BuildSpec:
    spec = tiny_spec()
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})


def test_what_is_built_is_warm_and_has_no_reason(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    found = findings(store, tiny_spec(), ENTRIES)

    assert [(f.state, f.entries) for f in found] == [("warm", (entry,)) for entry in ENTRIES]
    assert reasons(found) == ()


def test_an_upgrade_is_one_reason_for_all_names_both_versions_and_costs_every_unit_once(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    (reason,) = reasons(findings(store, tiny_spec(), ENTRIES, UPGRADED))

    assert reason.state == "changed"
    assert reason.num_entries == 2
    assert [f.changes for f in reason.findings] == [(Change("target.toolchain.torch", "none", "2.14"),)] * 2
    assert reason.cost(History.of_store(store)) == Cost(num_units=3, seconds=3 * SECONDS, num_untimed=0)
    store.actions.discard(key_of("layer c"))
    assert reason.cost(History.of_store(store)) == Cost(num_units=3, seconds=2 * SECONDS, num_untimed=1)


def test_new_entries_were_never_built_and_are_one_reason(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    (reason,) = reasons(findings(store, tiny_spec(), (DefragEntry(3), *ENTRIES, DefragEntry(4))))

    assert reason.state == "never built"
    assert [f.entries[0] for f in reason.findings] == [DefragEntry(3), DefragEntry(4)]
    assert (reason.findings[0].changes, reason.findings[0].nearest) == ((), None)
    assert reason.cost(History.of_store(store)) == Cost(0, 0, 0)


def test_different_reasons_are_told_apart(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES[:1], LABELS)
    built(store, spec_with_dtype("bfloat16"), ENTRIES[1:], LABELS[1:])

    entries = (DefragEntry(1), DefragEntry(2), DefragEntry(3))
    upgraded = reasons(findings(store, tiny_spec(), entries, UPGRADED))
    here = reasons(findings(store, tiny_spec(), entries))

    rows = [(r.state, r.is_certain, [c.name for c in r.findings[0].changes]) for r in (*upgraded, *here)]
    assert rows == [
        ("changed", True, ["target.toolchain.torch"]),
        ("changed", True, ["model.model.dtype", "target.toolchain.torch"]),
        ("never built", False, []),
        ("changed", False, ["model.model.dtype"]),
        ("never built", False, []),
    ]


def test_a_program_whose_object_is_gone_is_lost_and_not_changed(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)
    key = program_key(ENTRIES[0], tiny_spec(), FAKE).hex
    store.objects.discard(Digest.parse(History.of_store(store).programs[key].digest))

    assert [f.state for f in findings(store, tiny_spec(), ENTRIES)] == ["lost", "warm"]


def test_a_unit_whose_object_is_gone_is_lost(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)
    store.objects.discard(Digest.of(key_of("layer b").encode()))

    (unit,) = (f for f in findings(store, tiny_spec(), ENTRIES) if not f.is_program)

    assert (unit.label, unit.state, unit.changes) == ("layer b", "lost", ())


def test_a_traced_unit_names_the_upgrade_that_it_waits_for(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES[:1], (("swap a",),))
    seed(store, tiny_spec(), ENTRIES[:1], (("swap a",),), UPGRADED)

    (reason,) = reasons(findings(store, tiny_spec(), ENTRIES[:1], UPGRADED))

    assert not reason.findings[0].is_program
    assert reason.findings[0].changes == (Change("target.toolchain.torch", "none", "2.14"),)
    assert reason.findings[0].lines is None
    assert reason.cost(History.of_store(store)) == Cost(1, SECONDS, 0)


OLD_TEXT = f"{text_of('swap a')}\nmore"


def trace_anew(store: Store) -> Finding:
    """Traces the program of an entry whose unit was compiled from `OLD_TEXT`; returns what is said of the unit."""
    compiled(store, OLD_TEXT, "swap a")
    seed(store, tiny_spec(), ENTRIES[:1], (("swap a",),))
    (unit,) = (f for f in findings(store, tiny_spec(), ENTRIES[:1]) if not f.is_program)
    return unit


def test_a_unit_with_another_graph_shows_the_line_that_differs(store: Store) -> None:
    text = str(store.objects.put_bytes(OLD_TEXT.encode()))
    row = ProgramRow(program=text, units={"0" * 64: UnitSource(text=text, label="swap a")})
    store.actions.put("0" * 64, row.model_dump(mode="json"))

    unit = trace_anew(store)

    sha256 = [Digest.of(t.encode()).sha256 for t in (OLD_TEXT, text_of("swap a"))]
    assert unit.changes == (Change("graph", *sha256),)
    assert unit.lines == ("more", "")


def test_a_unit_whose_old_text_is_gone_shows_no_line(store: Store) -> None:
    unit = trace_anew(store)

    assert [c.name for c in unit.changes] == ["graph"]
    assert unit.lines is None


def test_a_unit_never_traced_before_is_never_built(store: Store) -> None:
    seed(store, tiny_spec(), ENTRIES[:1], (("swap a",),))

    assert [f.state for f in findings(store, tiny_spec(), ENTRIES[:1])] == ["warm", "never built"]


def test_history_passes_over_what_is_no_record_of_ours(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)
    store.actions.put("0" * 64, {"program": 1})
    store.actions.put("1" * 64, {})
    (store.root / "records" / "22").mkdir()
    (store.root / "records" / "22" / f"{'2' * 64}.json").write_text("not JSON")

    history = History.of_store(store)

    assert (len(history.programs), len(history.units)) == (2, 3)


def test_history_holds_what_lower_layers_have(store: Store, tmp_path: object) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)
    upper = Store.open(store.root.parent / "upper", lower=[store.root])

    assert History.of_store(upper) == History.of_store(store)


def test_against_compares_with_what_is_given_and_nothing_else() -> None:
    spec = tiny_spec()
    old = ProgramKeys(spec, FAKE, {"graphs": "old", "transformers": "5"})
    new = ProgramKeys(spec, FAKE, {"graphs": "new", "transformers": "5"})
    programs = [BuiltProgram(old.hex_of(e), dict(old.of(e).components), ("u",)) for e in ENTRIES[:1]]

    (same,) = explain_against(ENTRIES[:1], old, programs)
    (changed, other) = explain_against(ENTRIES, new, programs)

    assert (same.state, same.changes) == ("warm", ())
    assert (changed.state, changed.changes) == ("changed", (Change("toolchain.graphs", "old", "new"),))
    assert other.state == "never built"
    assert changed.unit_keys == ("u",)


@pytest.mark.parametrize(
    ("keys", "cost"),
    [((), Cost(0, 0, 0)), (("a", "a"), Cost(1, 2.0, 0)), (("a", "b", "?"), Cost(3, 5.0, 1))],
)
def test_a_cost_counts_each_unit_once(keys: tuple[str, ...], cost: Cost) -> None:
    units = {key: BuiltUnit(key, {}, "", seconds) for key, seconds in (("a", 2.0), ("b", 3.0))}

    assert Cost.of(keys, units) == cost


SMALL = st.sampled_from("abc")


@st.composite
def components(draw: st.DrawFn) -> dict[str, str]:
    kind = draw(st.sampled_from(["prompt", "defrag"]))
    fields = ["batch_size", "query_len", "num_ctx_blocks"] if kind == "prompt" else ["padded_swaps"]
    rest = ["model.dtype", "limits.block_size", "toolchain.graphs", "target.isa", "target.toolchain.torch"]
    return {
        "schema": "aotgaudi.program-key/2",
        "entry.kind": kind,
        **{f"entry.{name}": draw(SMALL) for name in fields},
        **{name: draw(SMALL) for name in rest},
    }


def own(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in rows.items() if name.startswith("entry.")}


def model(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in rows.items() if name.startswith(("model.", "limits."))}


def rank(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[bool, int]:
    return model(old) != model(new), sum(old[name] != new[name] for name in new)


@given(st.lists(components(), max_size=30), components())
def test_no_program_of_the_entry_is_nearer_than_the_one_that_is_found(
    rows: list[dict[str, str]], wanted: dict[str, str]
) -> None:
    built = [BuiltProgram(f"{number:04}", row) for number, row in enumerate(rows)]
    ranks = [rank(row, wanted) for row in rows if own(row) == own(wanted)]

    found = NearestProgram(built).find(wanted)

    assert (rank(found.components, wanted) if found else None) == (min(ranks) if ranks else None)


@given(st.lists(components(), max_size=20), components(), st.randoms(use_true_random=False))
def test_the_order_of_what_was_built_does_not_matter(
    rows: list[dict[str, str]], wanted: dict[str, str], random: st.DataObject
) -> None:
    built = [BuiltProgram(f"{number:04}", row) for number, row in enumerate(rows)]
    shuffled = sorted(built, key=lambda _: random.random())  # type: ignore[attr-defined]

    assert NearestProgram(built).find(wanted) == NearestProgram(shuffled).find(wanted)


@given(components(), components())
def test_changes_name_exactly_what_differs(old: dict[str, str], new: dict[str, str]) -> None:
    found = changes(old, new)

    assert {c.name for c in found} == {n for n in {*old, *new} if old.get(n) != new.get(n)}
    assert all((c.old, c.new) == (old.get(c.name), new.get(c.name)) for c in found)


def test_the_same_model_comes_before_another_one_that_differs_less() -> None:
    wanted = {"entry.kind": "p", "entry.n": "1", "model.a": "1", "target.x": "1", "target.y": "1"}
    upgraded = BuiltProgram("a", {**wanted, "target.x": "0", "target.y": "0"})
    neighbour = BuiltProgram("b", {**wanted, "entry.n": "2"})
    other_model = BuiltProgram("c", {**wanted, "model.a": "0"})

    assert NearestProgram([upgraded, neighbour, other_model]).find(wanted) == upgraded
    assert NearestProgram([neighbour, other_model]).find(wanted) == other_model
    assert NearestProgram([neighbour]).find(wanted) is None


def unit(key: str, graph: str, target: str, label: str) -> BuiltUnit:
    return BuiltUnit(key, {"graph": graph, "target.x": target}, label, 1.0)


def test_a_unit_of_the_same_graph_comes_first_then_one_of_the_same_label() -> None:
    wanted = {"graph": "g", "target.x": "1"}
    same_graph, same_label = unit("a", "g", "0", "other"), unit("b", "h", "1", "layer")
    strange = unit("c", "i", "1", "other")

    assert NearestUnit([same_graph, same_label, strange]).find(wanted, "layer") == same_graph
    assert NearestUnit([same_label, strange]).find(wanted, "layer") == same_label
    assert NearestUnit([strange]).find(wanted, "layer") is None


def test_a_component_that_one_side_lacks_is_a_change() -> None:
    assert changes({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == (
        Change("c", None, "3"),
        Change("a", "1", None),
    )
