"""Which weights units take, joined and in which layout; which are needed for a while only."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.digest import Digest
from aotgaudi.runtime.bindings import WeightBinding, passing_weights, placed, weight_bindings
from tests.unit.runtime.test_executables import program

ONE, OTHER = "1" * 64, "2" * 64


def receipt(**layouts: Mapping[str, str]) -> Receipt:
    artifact = {"unit.so": Digest.of(b"x")}
    units = {
        key: SealedUnit(artifact=artifact, tolerance=0, layouts=layouts.get(name, {}))
        for key, name in ((ONE, "one"), (OTHER, "other"))
    }
    return Receipt(
        manifest_id="m", target=Target(backend="fake", machine="x"), programs={}, units=units, builder={}
    )


CALLS = [
    (ONE, ("step:x", "weight:q+k", "weight:norm"), ("0.0",)),
    (OTHER, ("tmp:0.0", "weight:embed", "weight:norm"), ("1.0",)),
    (ONE, ("tmp:1.0", "weight:q+k", "weight:embed"), ("2.0",)),
]


def test_layouts_go_with_the_unit_that_asks_for_them() -> None:
    bound = placed(program(CALLS, ("2.0",)), receipt(one={"1": "onednn"}))

    assert [call.inputs for call in bound.calls] == [
        ("step:x", "weight:q+k@onednn", "weight:norm"),
        ("tmp:0.0", "weight:embed", "weight:norm"),
        ("tmp:1.0", "weight:q+k@onednn", "weight:embed"),
    ]


def test_without_layouts_a_program_stays_as_it_is() -> None:
    assert placed(program(CALLS, ("2.0",)), receipt()) == program(CALLS, ("2.0",))


def test_a_unit_of_no_receipt_is_named() -> None:
    with pytest.raises(KeyError, match="3333"):
        placed(program([("3" * 64, ("step:x",), ("0.0",))], ("0.0",)), receipt())


@pytest.mark.parametrize(
    ("text", "names", "layout"),
    [
        ("weight:a.b", ("a.b",), None),
        ("weight:a+b", ("a", "b"), None),
        ("weight:a@onednn", ("a",), "onednn"),
        ("weight:a+b@onednn", ("a", "b"), "onednn"),
    ],
)
def test_bindings_are_read(text: str, names: tuple[str, ...], layout: str | None) -> None:
    binding = WeightBinding.parse(text)

    assert (binding.names, binding.layout) == (names, layout)
    assert binding.is_plain == (text == "weight:a.b")


def test_what_no_unit_takes_as_it_is_stored_is_needed_for_a_while_only() -> None:
    bound = placed(program(CALLS, ("2.0",)), receipt(one={"2": "onednn"}))
    bindings = list(weight_bindings([bound, bound]))

    assert [binding.text for binding in bindings] == [
        "weight:q+k",
        "weight:norm@onednn",
        "weight:embed",
        "weight:norm",
        "weight:embed@onednn",
    ]
    assert passing_weights(bindings) == {"q", "k"}
