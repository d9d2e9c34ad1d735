"""What an upgrade would invalidate: of what is built, and nothing else."""

from __future__ import annotations

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.compile.keys import ProgramKeys
from aotgaudi.compile.plan import make_plan
from aotgaudi.compile.what_if import WhatIf, parse_changes, what_if
from aotgaudi.compile.why import Change, Cost
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import SpecError
from aotgaudi.store.store import Store
from tests.unit.compile.explaining import SECONDS, built
from tests.unit.compile.test_keys import TARGET
from tests.workload import FAKE, seed, tiny_spec

ENTRIES = (DefragEntry(1), DefragEntry(2))
LABELS = (("swap a", "layer b"), ("swap a", "layer c"))


def parsed(*settings: str, target: Target = FAKE) -> tuple[Change, ...]:
    return parse_changes(settings, ProgramKeys(tiny_spec(), target), target)


def asked(store: Store, *settings: str) -> WhatIf:
    plan = make_plan(ENTRIES, tiny_spec(), FAKE, store)
    return what_if(parsed(*settings), plan, tiny_spec(), store)


def test_another_torch_costs_every_unit_for_certain(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    answer = asked(store, "torch=2.14")

    assert answer.changes == (Change("target.toolchain.torch", "none", "2.14"),)
    assert (answer.num_entries, answer.num_programs, answer.already, answer.num_cold) == (2, 2, 0, 0)
    assert (answer.units, answer.is_certain) == (Cost(3, 3 * SECONDS, 0), True)


def test_another_transformers_costs_units_only_perhaps(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    answer = asked(store, "transformers=0")

    assert (answer.num_programs, answer.units.num_units, answer.is_certain) == (2, 3, False)


def test_what_is_not_built_cannot_be_invalidated(store: Store) -> None:
    seed(store, tiny_spec(), ENTRIES[:1], LABELS)

    answer = asked(store, "torch=2.14")

    assert (answer.num_programs, answer.num_cold, answer.units) == (0, 2, Cost(0, 0, 0))


def test_what_was_built_with_the_new_version_is_found_again(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)
    new = FAKE.model_copy(update={"toolchain": {**FAKE.toolchain, "torch": "2.14"}})
    built(store, tiny_spec(), ENTRIES[:1], LABELS, new)

    answer = asked(store, "torch=2.14")

    assert (answer.num_programs, answer.already) == (1, 1)
    assert answer.units.num_units == 2


def test_the_version_that_is_there_changes_nothing(store: Store) -> None:
    built(store, tiny_spec(), ENTRIES, LABELS)

    answer = asked(store, "torch=none")

    assert (answer.changes, answer.num_programs, answer.already) == ((), 0, 2)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("torch=3", "target.toolchain.torch"),
        ("target.toolchain.torch=3", "target.toolchain.torch"),
        ("compiler=g++ 13", "target.toolchain.compiler"),
        (" compiler = g++ 13 ", "target.toolchain.compiler"),
        ("graphs=x", "toolchain.graphs"),
        ("transformers=6", "toolchain.transformers"),
        ("limits.block_size=32", "limits.block_size"),
        ("target.flags.cpp.threads=2", "target.flags.cpp.threads"),
        ("model.model.dtype=bfloat16", "model.model.dtype"),
    ],
)
def test_names_are_short_or_whole(setting: str, name: str) -> None:
    (change,) = parsed(setting, target=TARGET)

    assert change.name == name
    assert change.new == setting.partition("=")[2].strip()


def test_a_level_of_the_cpu_changes_all_that_it_decides() -> None:
    flags = {"aotgaudi.isa": "avx2", "aotgaudi.compiler_flags": "-march=x86-64-v3", "cpp.simdlen": "256"}
    target = TARGET.model_copy(update={"isa": ISA_LEVELS["avx2"].features, "flags": flags})

    changes = {change.name: change.new for change in parsed("isa=avx512", target=target)}

    assert changes == {
        "target.isa": " ".join(ISA_LEVELS["avx512"].features),
        "target.flags.aotgaudi.isa": "avx512",
        "target.flags.aotgaudi.compiler_flags": "-march=x86-64-v4",
        "target.flags.cpp.simdlen": "512",
    }


def test_a_level_goes_together_with_other_names() -> None:
    target = TARGET.model_copy(update={"isa": ISA_LEVELS["avx2"].features})

    names = {change.name for change in parsed("isa=avx512", "compiler=g++ 13", target=target)}

    assert names == {"target.isa", "target.toolchain.compiler"}
    assert parsed("isa=avx2", target=target) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["tourch=2"],
            "--what-if: 'tourch' is in no key (known: compiler, graphs, isa, torch, transformers, ",
        ),
        (["torch"], "--what-if: is 'torch' (NAME=VALUE, e.g. torch=2.14)"),
        (["torch="], "NAME=VALUE"),
        (["=2"], "'' is in no key"),
        (["entry.kind=decode"], "cannot change 'entry.kind'"),
        (["schema=1"], "cannot change 'schema'"),
        (["isa=sse"], "isa is 'sse' (one of avx2, avx512, avx512+bf16, avx512+amx)"),
        (["torch=2", "target.toolchain.torch=3"], "gives target.toolchain.torch twice: '2' and '3'"),
    ],
)
def test_mistakes_name_what_would_be_right(settings: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        parsed(*settings, target=TARGET)

    assert message in str(error.value)


def test_replacing_refuses_a_name_that_is_in_no_key() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        ProgramKeys(tiny_spec(), FAKE).replacing({"nonsense": "1"})


def test_replacing_gives_the_key_that_the_other_target_has() -> None:
    other = FAKE.model_copy(update={"toolchain": {**FAKE.toolchain, "torch": "2.14"}})

    replaced = ProgramKeys(tiny_spec(), FAKE).replacing({"target.toolchain.torch": "2.14"})

    assert replaced.of(ENTRIES[0]) == ProgramKeys(tiny_spec(), other).of(ENTRIES[0])
    assert replaced.hex_of(ENTRIES[0]) == ProgramKeys(tiny_spec(), other).hex_of(ENTRIES[0])
