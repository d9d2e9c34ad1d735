"""The nearest thing that was built, against a search of everything."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.compile.why import BuiltProgram, BuiltUnit, Change, NearestProgram, NearestUnit, changes

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


def rank(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[bool, int, bool]:
    is_same_entry = own(old) == own(new)
    is_kin = is_same_entry and model(old) == model(new)
    return not is_kin, sum(old[name] != new[name] for name in new), not is_same_entry


@given(st.lists(components(), max_size=30), components())
def test_no_program_of_the_kind_is_nearer_than_the_one_that_is_found(
    rows: list[dict[str, str]], wanted: dict[str, str]
) -> None:
    built = [BuiltProgram(f"{number:04}", row) for number, row in enumerate(rows)]
    ranks = [rank(row, wanted) for row in rows if row["entry.kind"] == wanted["entry.kind"]]

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


def test_the_same_entry_of_the_same_model_comes_before_another_one_that_differs_less() -> None:
    wanted = {"entry.kind": "p", "entry.n": "1", "model.a": "1", "target.x": "1", "target.y": "1"}
    upgraded = BuiltProgram("a", {**wanted, "target.x": "0", "target.y": "0"})
    neighbour = BuiltProgram("b", {**wanted, "entry.n": "2"})
    other_model = BuiltProgram("c", {**wanted, "model.a": "0", "target.x": "0"})

    assert NearestProgram([upgraded, neighbour, other_model]).find(wanted) == upgraded
    assert NearestProgram([neighbour, other_model]).find(wanted) == neighbour
    assert NearestProgram([other_model]).find(wanted) == other_model
    assert NearestProgram([]).find(wanted) is None


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
