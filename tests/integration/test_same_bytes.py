"""One key is one set of bytes: whoever compiles, wherever, whenever, and after whatever else.

And the bytes hold what their level may hold: no other instruction, and no path of the machine that built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features
from aotgaudi.digest import Digest
from aotgaudi.store.store import Store

DEADLINE_SECONDS = 400.0
HAS_AVX512 = cpu_features() >= set(ISA_LEVELS["avx512"].features)
BEST = "avx512" if HAS_AVX512 else "avx2"

LAYER = """\
"aotgaudi.graph/2"
["input","bfloat16",[4,64],[64,1]]
["input","bfloat16",[64,64],[64,1]]
["call","aten.mm.default",[{"%":0},{"%":1}],{}]
["call","aten.silu.default",[{"%":2}],{}]
["call","aten.mul.Tensor",[{"%":3},{"%":0}],{}]
["output",[{"%":4}]]
"""
"""In bfloat16: its conversions are where a compiler likes to use what the machine has."""

OTHER = LAYER.replace("silu", "relu").replace("64", "48")

SCRIPT = """
import json, sys
from pathlib import Path
from aotgaudi.backends.inductor.probe import probe
from aotgaudi.compile.keys import unit_key
from aotgaudi.compile.jobs import CompileJob, run_compile
from aotgaudi.compile.workers import start_worker
from aotgaudi.store.store import Store

root, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
store = Store.open(root)
start_worker(str(root / "toolcache"))
for isa, text in jobs:
    target = probe(isa)
    digest, key = str(store.objects.put_bytes(text.encode())), unit_key(text, target).hex
    row = run_compile(CompileJob(key, digest, "unit", target, store.root, root / "logs" / "unit.log"))
    print(json.dumps({"isa": isa, "key": key, **row.model_dump(mode="json")["artifact"]}), flush=True)
"""


@dataclass(frozen=True)
class Built:
    """What one process compiled: a row a job, and the bytes of each artifact."""

    rows: list[dict[str, str]]
    data: list[bytes]
    root: Path


def build(root: Path, jobs: list[tuple[str, str]], umask: int, **environment: str) -> Built:
    """Compiles `jobs` (instruction set, text) in one new process, with this environment and umask."""
    root.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root / "store"), json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        cwd=root,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    store = Store.open(root / "store", create=False, read_only=True, trust_others=True)
    data = [store.objects.read(Digest.parse(row["unit.so"])) for row in rows]
    return Built(rows, data, root)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The unit, compiled first thing in a process."""
    return build(tmp_path_factory.mktemp("a") / "b", [(BEST, LAYER)], 0o022, PYTHONHASHSEED="1")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Another unit, then the same one, then the same one for AVX2, where all that should not matter differs."""
    folder = tmp_path_factory.mktemp("another-place") / 'with a "lönger" path' / "than it's"
    (folder / "temporary").mkdir(parents=True)
    jobs = [(BEST, OTHER), (BEST, LAYER), ("avx2", LAYER)]
    return build(
        folder / "the" / "fir$t, a=b;",
        jobs,
        0o077,
        PYTHONHASHSEED="2",
        HOME="/nonexistent",
        USER="somebody-else",
        LOGNAME="somebody-else",
        TMPDIR=str(folder / "temporary"),
        TZ="Pacific/Kiritimati",
        LC_ALL="C",
        CXX="/nonexistent/c++",
        CPATH="/nonexistent/include",
        LD_RUN_PATH="/nonexistent/lib",
        ATEN_CPU_CAPABILITY="default",
        TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE="7",
        TORCHINDUCTOR_SIZE_ASSERTS="0",
        TORCHINDUCTOR_VEC_ISA_OK="0",
        AOT_INDUCTOR_DEBUG_SYMBOLS="1",
    )


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_who_compiles_where_and_after_what(plain: Built, elsewhere: Built) -> None:
    assert plain.rows[0] == elsewhere.rows[1]
    assert plain.data[0] == elsewhere.data[1]
    units = {row["unit.so"] for row in elsewhere.rows}
    assert len(units) == len({(BEST, OTHER), (BEST, LAYER), ("avx2", LAYER)})  # one less without AVX-512


@pytest.mark.slow
def test_no_path_is_in_the_bytes(plain: Built, elsewhere: Built) -> None:
    text = re.compile(rb"[\x20-\x7e]{4,}\0")
    for data in (*plain.data, *elsewhere.data):
        strings = [match.group()[:-1] for match in text.finditer(data)]
        assert b"unit/wrapper.cpp" in strings
        assert [string for string in strings if re.match(rb"/\w+/", string)] == []


def disassembly(folder: Path, data: bytes) -> str:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not here")
    path = folder / "unit.so"
    path.write_bytes(data)
    done = subprocess.run([objdump, "-d", "--no-show-raw-insn", str(path)], capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.slow
def test_code_for_avx2_has_no_register_of_avx512(elsewhere: Built, tmp_path: Path) -> None:
    code = disassembly(tmp_path, elsewhere.data[2])

    assert re.search(r"%ymm\d", code)
    assert re.findall(r"%(?:zmm\d+|k[0-7]\b|[xy]mm(?:1[6-9]|2\d|3[01]))", code) == []


BEYOND = re.compile(
    r"\tv?(?:pdp\w+|\w*bf16\w*|\w+ph|tdp\w+|\w*tile\w*|perm[it]?2?b|pmadd52\w+|gf2p8\w+|popcnt[bw]) "
)
"""VNNI, BF16, FP16, AMX, VBMI, IFMA, GFNI: what machines with AVX-512 may have or lack."""


@pytest.mark.parametrize(
    "line",
    [
        "\tvpdpbusd %zmm1,%zmm2,%zmm3",
        "\tvcvtne2ps2bf16 %zmm1,%zmm2,%zmm3",
        "\tvaddph %zmm1,%zmm2,%zmm3",
        "\tvpermi2b %zmm1,%zmm2,%zmm3",
        "\ttdpbf16ps %tmm1,%tmm2,%tmm3",
        "\ttileloadd (%rax),%tmm0",
        "\tldtilecfg (%rax)",
    ],
)
def test_what_is_beyond_avx512_is_recognised(line: str) -> None:
    assert BEYOND.search(line)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_AVX512, reason="this machine has no AVX-512")
def test_code_for_avx512_has_nothing_beyond_its_level(plain: Built, tmp_path: Path) -> None:
    code = disassembly(tmp_path, plain.data[0])

    assert re.search(r"%zmm\d", code)
    assert BEYOND.findall(code) == []
