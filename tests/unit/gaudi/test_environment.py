"""Which variables are sealed, which ones processes get, and where their recipes lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.gaudi.environment import (
    ENGINE_RULES,
    NEUTRAL,
    RECIPE_RULES,
    ProcessRules,
    may_change_code,
    process_environment,
    sealed_setting,
    sealed_variables,
)

names = st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True) | st.sampled_from(
    [*NEUTRAL, *ENGINE_RULES.removed, *ENGINE_RULES.settings, "ENABLE_EXPERIMENTAL_FLAGS", "HOME"]
)
all_rules = st.sampled_from([RECIPE_RULES, ENGINE_RULES])
environments = st.dictionaries(names, st.text(st.characters(codec="ascii", exclude_characters="\0")))


@pytest.mark.parametrize(
    "name",
    [
        *("PT_HPU_LAZY_MODE", "PT_HPU_ANYTHING_NEW", "PT_ENABLE_INT64_SUPPORT", "HABANA_ANYTHING"),
        *("ENABLE_EXPERIMENTAL_FLAGS", "EXP_FLAGS", "FUSER_ENABLE_LOW_UTILIZATION", "RUNTIME_SCALE_PATCHING"),
        *(
            "QUANT_CONFIG",
            "GC_KERNEL_PATH",
            "SYNAPSE_CONFIGURATION_FILE",
            "DETERMINISTIC_MODE",
            "RUN_TPC_FUSER",
        ),
        *("HCL_X", "TPC_X", "INC_X", "TORCH_X"),
    ],
)
def test_what_may_change_code_is_sealed(name: str) -> None:
    assert may_change_code(name)


@pytest.mark.parametrize("name", [*NEUTRAL, "LOG_LEVEL_ALL", "HOME", "PATH", "VLLM_PORT", "HOSTNAME"])
def test_what_cannot_is_not(name: str) -> None:
    assert not may_change_code(name)


def test_every_neutral_name_has_its_reason_and_begins_like_what_is_sealed() -> None:
    assert all(NEUTRAL.values())
    assert all(may_change_code(f"{name}_X") for name in NEUTRAL)


@given(environments, st.integers(0, 7) | st.none(), all_rules)
def test_a_process_has_what_it_needs_and_nothing_that_harms(
    environment: dict[str, str], module: int | None, rules: ProcessRules
) -> None:
    made = process_environment(environment, Path("/run/recipes"), module, rules)

    assert not rules.removed.keys() & made.keys()
    assert made.items() >= rules.settings.items()
    assert made["PT_HPU_RECIPE_CACHE_CONFIG"] == "/run/recipes,false,0"
    assert process_environment(made, Path("/run/recipes"), module, rules) == made
    card = () if module is None else ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES")
    untouched = set(environment) - {*rules.changes(environment), *card, "PT_HPU_RECIPE_CACHE_CONFIG"}
    assert all(made[name] == environment[name] for name in untouched)


def test_another_engine_keeps_its_mode_its_ranks_and_its_fallbacks() -> None:
    theirs = {
        "PT_HPU_LAZY_MODE": "1",
        "PT_HPU_USE_EAGER_FALLBACK": "1",
        "RANK": "3",
        "PT_HPU_INFERENCE_MODE": "1",
    }

    made = process_environment(theirs, Path("/run/recipes"), rules=RECIPE_RULES)

    assert made.items() >= theirs.items()
    assert "PT_HPU_METRICS_GC_DETAILS" not in made


def test_what_is_changed_is_told_with_the_reason() -> None:
    changes = ENGINE_RULES.changes(
        {"PT_HPU_LAZY_MODE": "1", "PT_HPU_AUTOLOAD": "1", "RANK": "3", "HOME": "/"}
    )

    assert changes == {"PT_HPU_LAZY_MODE": "set to 0", "RANK": "removed: one card, one process"}


@given(environments, st.integers(0, 7))
def test_neither_directory_nor_card_changes_what_is_sealed(environment: dict[str, str], module: int) -> None:
    environment = {name: value for name, value in environment.items() if name not in _FILES}
    one = process_environment(environment, Path("/one"), 0)
    other = process_environment(environment, Path("/other"), module)

    assert sealed_variables(one) == sealed_variables(other)


def test_files_are_sealed_by_their_content(tmp_path: Path) -> None:
    def sealed(folder: str, content: bytes) -> object:
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "file"
        path.write_bytes(content)
        return sealed_variables({"QUANT_CONFIG": str(path), "GC_KERNEL_PATH": f"{path}:{path}"})

    assert sealed("a", b"1") == sealed("b", b"1")
    assert sealed("c", b"1") != sealed("d", b"2")


def calibrated(folder: Path, measured: bytes = b"1", **more: object) -> str:
    """What is sealed of a calibration that lies below `folder`."""
    folder.mkdir()
    config = {"mode": "QUANTIZE", "dump_stats_path": str(folder / "out" / "measure"), **more}
    (folder / "out").mkdir()
    (folder / "out" / "measure_hooks_maxabs_0_2.npz").write_bytes(measured)
    (folder / "out" / "others.npz").write_bytes(os.urandom(8))
    (folder / "maxabs.json").write_text(json.dumps(config, indent=int(measured == b"1")))
    return sealed_variables({"QUANT_CONFIG": str(folder / "maxabs.json")})["QUANT_CONFIG"]


def test_a_calibration_is_sealed_by_what_it_says_and_by_its_measurements(tmp_path: Path) -> None:
    first = calibrated(tmp_path / "a")

    assert first == calibrated(tmp_path / "elsewhere")
    assert first != calibrated(tmp_path / "b", measured=b"2"), "calibrated anew"
    assert first != calibrated(tmp_path / "c", scale_method="maxabs_hw")
    (tmp_path / "a" / "out" / "measure_hooks_maxabs_1_2.npz").write_bytes(b"1")
    assert first != sealed_variables({"QUANT_CONFIG": str(tmp_path / "a" / "maxabs.json")})["QUANT_CONFIG"]


def test_a_calibration_whose_measurements_are_still_to_be_taken_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "measure.json"
    path.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(tmp_path / "none" / "m")}))

    assert sealed_variables({"QUANT_CONFIG": str(path)})["QUANT_CONFIG"].startswith("sha256:")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match="QUANT_CONFIG: names /nowhere"):
        sealed_variables({"QUANT_CONFIG": "/nowhere"})


_FILES = ("QUANT_CONFIG", "SYNAPSE_CONFIGURATION_FILE", "GC_KERNEL_PATH")


def test_what_we_write_has_three_fields_and_keeps_everything() -> None:
    assert sealed_setting(Path("/c")) == "/c,false,0"


def test_a_comma_would_end_the_directory() -> None:
    with pytest.raises(SpecError, match="comma"):
        sealed_setting(Path("/a,b"))
