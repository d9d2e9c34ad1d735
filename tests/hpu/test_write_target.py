"""``aotgaudi doctor --hpu --write-target``, and planning with what it wrote, without the double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.probe import require_whole
from aotgaudi.cli.main import cli
from tests.environment import ROOT
from tests.hpu.test_command import doctor

pytestmark = pytest.mark.hpu_double

SPEC = ROOT / "manifests" / "llama-3.1-8b.gaudi3.manifest.json"


def test_a_machine_writes_its_target_and_another_plans_with_it(newest: Path, tmp_path: Path) -> None:
    libraries = str(newest / "usr" / "lib" / "habanalabs")
    target, store = tmp_path / "target.json", tmp_path / "store"

    done = doctor(
        newest,
        tmp_path,
        *("--only", "H-05,H-06,H-09", "--write-target", str(target)),
        LD_LIBRARY_PATH=libraries,
        RANK="1",
    )
    planned = CliRunner().invoke(
        cli, ["build", "plan", str(SPEC), "--target", str(target), "--store", str(store), "--json"]
    )

    assert done.returncode == 0, done.stderr
    require_whole(Target.model_validate_json(target.read_bytes()))
    assert planned.exit_code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["target"]["toolchain"]["habana-torch-plugin"].endswith("double")
    assert plan["target"]["flags"]["hpu.key_mode"] == "stable"
    assert "env.RANK" not in plan["target"]["flags"]
    assert str(newest) not in target.read_text()
    assert plan["num_programs"] == len(plan["trace"]) > 0
