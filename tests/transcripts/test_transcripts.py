"""What commands print, and their exit codes: each ``*.txt`` here is run in a directory of its own; see `shell`."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.command import keep_rights
from tests.environment import ROOT
from tests.sealing import damage, seal, target_of
from tests.specs import ONE_SEQUENCE, spec_of
from tests.transcripts.shell import Shell, replay
from tests.workload import PoolInThisProcess, seed

HERE = Path(__file__).parent
OURS = ("AOTGAUDI_", "VLLM_", "PT_HPU_", "HABANA_", "QUANT_CONFIG", "HF_", "COLUMNS")


def traced(arguments: list[str], _: str) -> str:
    """``traced SPEC 'layer a,head b' ...``: puts programs of units with these labels into the store."""
    manifest = Manifest.of(load_spec(Path(arguments[0])))
    store = Store.open(Path(os.environ["AOTGAUDI_STORE"]))
    seed(store, manifest.spec, manifest.entries, [labels.split(",") for labels in arguments[1:]])
    return ""


def sealed(arguments: list[str], _: str) -> str:
    """``sealed FOLDER [COLD [MANIFEST]]``: a bundle for "any" machine with torch 9.9; COLD entries are not answered."""
    (path, num_cold, manifest_id) = (*arguments, *("0", "")[len(arguments) - 1 :])
    target = target_of(machine="any", toolchain={"torch": "9.9"})
    manifest = Manifest.of(spec_of(limits=ONE_SEQUENCE))
    seal(manifest, Path(path), num_cold=int(num_cold), manifest_id=manifest_id, target=target)
    return ""


def damaged(arguments: list[str], _: str) -> str:
    """``damaged BUNDLE``: changes a byte of an object."""
    damage(Path(*arguments))
    return ""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell in a new directory with our manifests and a store, and without variables of ours."""
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for name, value in {"AOTGAUDI_STORE": "store", "COLUMNS": "80", "PWD": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("aotgaudi.compile.cards.LocalPool", PoolInThisProcess)
    keep_rights(monkeypatch)
    for path in (ROOT / "manifests", HERE / "data", ROOT / "tests" / "golden" / "data" / "hpu.target.json"):
        (tmp_path / path.name).symlink_to(path)
    return Shell(monkeypatch, {"traced": traced, "sealed": sealed, "damaged": damaged})


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_commands_print_what_the_transcript_says(
    path: Path, shell: Shell, pytestconfig: pytest.Config
) -> None:
    written = path.read_text(encoding="utf-8")

    now = replay(written, shell.run)

    if pytestconfig.getoption("--rewrite"):
        path.write_text(now, encoding="utf-8")
    elif now != written:
        diff = difflib.unified_diff(
            *(text.splitlines() for text in (written, now)), path.name, "now", lineterm=""
        )
        pytest.fail(
            "\n".join([*diff, "", "if that is right: pytest tests/transcripts --rewrite"]), pytrace=False
        )


TRANSCRIPT = r"""Prose.

  $ cat > a.txt << EOF
  one

  two $HERE
  3
  EOF
  $ sed 's/one/1/' a.txt | grep -v two
  $ aotgaudi \
      --version | sed 's/\d.*/N/'
  $ aotgaudi diff a.txt |& grep Error

More prose.

  $ export HERE=now
  $ echo $HERE $PWD/x
  $ echo '{"a": [{"b": 1}, {"b": "x"}], "c": {"d": null}}' | jq '.a[].b, .c.d, .a[1]'
  $ rm a.txt
  $ ls | grep txt
"""
PRINTED = (
    ("grep -v two\n", "  1\n\n  3\n"),
    (r"sed 's/\d.*/N/'" + "\n", "  aotgaudi, version N\n"),
    ("|& grep Error\n", "  Error: Missing argument 'B'.\n  [2]\n"),
    ("echo $HERE $PWD/x\n", "  now $PWD/x\n"),
    (".a[1]'\n", '  1\n  "x"\n  null\n  {"b": "x"}\n'),
)


def test_what_commands_print_takes_the_place_of_what_they_printed(shell: Shell) -> None:
    right = TRANSCRIPT
    for command, printed in PRINTED:
        right = right.replace(command, command + printed)
    wrong = right.replace("  1\n\n  3\n", "  was\n\n\n  here\n").replace("  [2]\n", "")

    assert replay(TRANSCRIPT, shell.run) == replay(wrong, shell.run) == replay(right, shell.run) == right


@pytest.mark.parametrize("command", ["nothing", "cat none", "sed 's/none/b/' data/quoted.env"])
def test_a_command_that_is_none_or_finds_nothing_is_an_error(shell: Shell, command: str) -> None:
    with pytest.raises(ValueError, match=command.split(maxsplit=1)[0]):
        shell.run(command)
