"""What is not in a key: a store built here is a hit wherever, whenever and by whomever it is looked up again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import aotgaudi
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store
from tests.unit.compile.explaining import built
from tests.workload import SPEC_TEXT, tiny_spec

pytestmark = pytest.mark.process

_LOOK_UP = """
import sys
from pathlib import Path
from aotgaudi.backends.inductor.probe import probe
from aotgaudi.backends.offline import probe_target
from aotgaudi.compile.keys import ProgramKeys, unit_key
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
manifest = Manifest.of(load_spec(Path(sys.argv[1])))
plan = plan_manifest(manifest, Store.open(Path(sys.argv[2])))
print("misses", len(plan.untraced) + len(plan.missing_units))
native = probe("avx2")
print("keys", manifest.id, unit_key("graph", native).hex)
for entry in manifest.entries:
    print(entry, ProgramKeys(manifest.spec, probe_target(manifest.spec.target)).hex_of(entry),
          ProgramKeys(manifest.spec, native).hex_of(entry))
"""


@dataclass(frozen=True)
class Change:
    """One thing of the surroundings that is another: variables, code that runs first, the folder, or a file."""

    environment: dict[str, str] = field(default_factory=dict)
    before: str = ""
    is_elsewhere: bool = False
    prepare: Callable[[Path], None] = lambda _: None
    umask: int = -1
    arguments: tuple[str, ...] = ()
    package_at: str = ""


HOST = "import os, platform, socket\nsocket.gethostname = platform.node = lambda: 'elsewhere'\n"
USER = "import getpass, os\ngetpass.getuser = os.getlogin = lambda: 'somebody'\n"
CLOCK = (
    "import time\n_now = time.time\ntime.time = lambda: _now() + 3e9\n"
    "_ns = time.time_ns\ntime.time_ns = lambda: _ns() + 3 * 10**18\n"
)


def _old(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))


VARIABLES = """
HOME=/nonexistent TMPDIR=/var/tmp XDG_CACHE_HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent HOSTNAME=elsewhere
USER=somebody LOGNAME=somebody LC_ALL=tr_TR.UTF-8 LANG=tr_TR.UTF-8 LANGUAGE=tr TZ=Asia/Tokyo TERM=dumb COLUMNS=20 NO_COLOR=1
PYTHONIOENCODING=latin-1 PYTHONUTF8=0 PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=12345 SOURCE_DATE_EPOCH=1
FOO=1 KUBERNETES_SERVICE_HOST=10.0.0.1 CI=true OMP_NUM_THREADS=7 MKL_NUM_THREADS=7
TORCHINDUCTOR_CACHE_DIR=/x TORCH_LOGS=+all CPATH=/x CXXFLAGS=-O0 GCC_COLORS= MAKEFLAGS=-j9
"""
CHANGES = {
    "variables": Change(dict(word.split("=") for word in VARIABLES.split())),
    "other variables": Change({"LC_ALL": "C", "PYTHONHASHSEED": "0"}),
    "host, user and clock": Change(before=HOST + USER + CLOCK),
    "folder, mtime and umask": Change(is_elsewhere=True, prepare=_old, umask=0o077),
    "checkout path": Change(package_at="another/checkout"),
    "optimised": Change(arguments=("-O",)),
}


@pytest.fixture(scope="module")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stability") / "store"
    manifest = Manifest.of(tiny_spec())
    store = Store.open(root)
    built(store, manifest.spec, manifest.entries, (("layer a", "head b"), ("layer a",)))
    return root


@pytest.fixture(scope="module")
def expected(store_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return look_up(store_root, tmp_path_factory.mktemp("expected"), Change())


def look_up(store_root: Path, folder: Path, change: Change) -> str:
    """What a fresh process finds in the store, and the keys that it makes."""
    spec = folder / "tiny.toml"
    spec.write_text(SPEC_TEXT, encoding="utf-8")
    package = Path(aotgaudi.__file__).parent
    if change.package_at:
        package = shutil.copytree(package, folder / change.package_at / "aotgaudi")
    change.prepare(folder)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), **change.environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, *change.arguments, "-c", change.before + _LOOK_UP, spec, store_root],
        cwd="/" if change.is_elsewhere else folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        umask=change.umask,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_is_a_hit(expected: str) -> None:
    assert expected.startswith("misses 0\nkeys ")
    assert len(expected.splitlines()) == 2 + len(Manifest.of(tiny_spec()).entries)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_surroundings_cost_no_miss(
    store_root: Path, expected: str, tmp_path: Path, change: Change
) -> None:
    assert look_up(store_root, tmp_path, change) == expected


def test_an_edit_of_the_graph_code_is_a_miss(store_root: Path, expected: str, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    found = look_up(store_root, tmp_path, Change(package_at="checkout", prepare=_edit("EDITED = 1")))

    assert not found.startswith("misses 0\n")


def test_a_comment_in_the_graph_code_is_a_hit(store_root: Path, expected: str, tmp_path: Path) -> None:
    found = look_up(store_root, tmp_path, Change(package_at="checkout", prepare=_edit("# mended")))

    assert found == expected


def _edit(line: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with (folder / "checkout" / "aotgaudi" / "graphs" / "step.py").open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")

    return edit
