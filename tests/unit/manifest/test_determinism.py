"""The same specs give the same manifests, id and bytes, in any process on this machine.

Each test enumerates all specs below in a process that differs from this one in one thing.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.spec.parse import load_spec

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ENVIRONMENTS = ROOT / ".venv" / "pythons"

LARGE = """
schema = "aotgaudi.spec/1"
[model]
name = "Großes Modell ıİ 模型"
dtype = "bfloat16"
[model.config]
model_type = "llama"
max_position_embeddings = 131072
rms_norm_eps = 1e-5
rope_theta = 5e5
tiny = 5e-324
third = 0.3333333333333333
"schlüssel" = ["ü", "\\u2028", { b = 1, a = 1.0 }]
[limits]
max_num_seqs = 256
max_num_prefill_seqs = 16
max_num_batched_tokens = 131072
max_model_len = 131072
block_size = 128
num_blocks = 5746
[bucketing]
%s
[[sampler.settings]]
temperature = 0.1
top_p = 0.30000000000000004
top_k = 3
[[sampler.settings]]
temperature = 0
top_p = 1
top_k = 0
"""
BUCKETING = {
    "exponential": "",
    "upstream": 'coverage = "upstream"',
    "contiguous": "contiguous_pa = true",
    "speculative": "num_speculative_tokens = 3",
}
SCRIPT = """
import hashlib, json, locale, sys
from pathlib import Path
locale.setlocale(locale.LC_ALL, "")
from aotgaudi.manifest.manifest import dumps
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
manifests = [Manifest.of(load_spec(Path(path))) for path in sys.argv[1:]]
print(json.dumps([[one.id, hashlib.sha256(dumps(one)).hexdigest()] for one in manifests]))
"""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    folder = tmp_path_factory.mktemp("specs")
    for name, bucketing in BUCKETING.items():
        (folder / f"{name}.toml").write_text(LARGE % bucketing, encoding="utf-8")
    return (*sorted(folder.glob("*.toml")), *sorted(MANIFESTS.glob("*.toml")))


@pytest.fixture(scope="module")
def expected(specs: tuple[Path, ...]) -> list[list[str]]:
    return enumerated(specs)


def enumerated(
    specs: Sequence[Path],
    *,
    python: str | Path = sys.executable,
    options: Sequence[str] = (),
    cwd: Path = ROOT,
    unset: Sequence[str] = (),
    **variables: str,
) -> list[list[str]]:
    """Id and sha256 of the file of each spec's manifest, from a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [str(python), *options, "-c", SCRIPT, *map(str, specs)],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def turkish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the locale tr_TR, compiled here: few machines have it, most have its source."""
    folder = tmp_path_factory.mktemp("locales")
    command = ["localedef", "--no-archive", "-i", "tr_TR", "-f", "UTF-8", str(folder / "tr_TR.utf8")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the locale tr_TR cannot be compiled here: {error}")
    return folder


def test_this_process_and_another_one_agree(specs: tuple[Path, ...], expected: list[list[str]]) -> None:
    assert [Manifest.of(load_spec(path)).id for path in specs] == [manifest_id for manifest_id, _ in expected]
    assert len({manifest_id for manifest_id, _ in expected}) == len(specs)


OTHERS: dict[str, dict[str, str]] = {
    "a hash seed": {"PYTHONHASHSEED": "0"},
    "a random hash seed": {"PYTHONHASHSEED": "random"},
    "a locale without language": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "variables of Python and of terminals": {
        "TZ": "Asia/Kathmandu",
        "PYTHONIOENCODING": "ascii",
        "PYTHONOPTIMIZE": "2",
        "COLUMNS": "1",
        "NO_COLOR": "1",
        "SOURCE_DATE_EPOCH": "0",
    },
    "variables of servers": {
        "VLLM_BUCKETING_STRATEGY": "lin",
        "VLLM_EXPONENTIAL_BUCKETING": "false",
        "VLLM_CONTIGUOUS_PA": "true",
        "VLLM_PROMPT_QUERY_BUCKET_MIN": "1",
        "VLLM_PROMPT_BS_BUCKET_MAX": "3",
        "VLLM_DECODE_BLOCK_BUCKET_STEP": "7",
        "VLLM_BUCKETING_FROM_FILE": "/absent",
        "VLLM_DEFRAG_THRESHOLD": "1",
        "VLLM_SKIP_WARMUP": "true",
        "PT_HPU_LAZY_MODE": "1",
        "OMP_NUM_THREADS": "7",
        "CUDA_VISIBLE_DEVICES": "",
        "AOTGAUDI_STORE": "/absent",
    },
}


@pytest.mark.parametrize("variables", OTHERS.values(), ids=OTHERS)
def test_variables(specs: tuple[Path, ...], expected: list[list[str]], variables: dict[str, str]) -> None:
    assert enumerated(specs, **variables) == expected


def test_locale_with_other_case_rules_and_a_decimal_comma(
    specs: tuple[Path, ...], expected: list[list[str]], turkish: Path
) -> None:
    assert enumerated(specs, LOCPATH=str(turkish), LC_ALL="tr_TR.utf8", PYTHONUTF8="0") == expected


def test_no_home_and_hardly_any_environment(specs: tuple[Path, ...], expected: list[list[str]]) -> None:
    assert enumerated(specs, unset=[name for name in os.environ if name != "LD_LIBRARY_PATH"]) == expected


def test_working_directory(specs: tuple[Path, ...], expected: list[list[str]], tmp_path: Path) -> None:
    relative = [Path(os.path.relpath(path, tmp_path)) for path in specs]

    assert enumerated(specs, cwd=Path("/")) == expected
    assert enumerated(relative, cwd=tmp_path) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_python_version(specs: tuple[Path, ...], expected: list[list[str]], version: str) -> None:
    """Run ``bash ci/pythons`` once: it makes an environment for each Python that the machine has."""
    python = ENVIRONMENTS / version / "bin" / "python"
    if not python.exists():
        made = sorted(folder.name for folder in ENVIRONMENTS.glob("3.*"))
        pytest.skip(
            f"no environment of Python {version} (see ci/pythons); there are: {', '.join(made) or 'none'}"
        )

    assert enumerated(specs, python=python, PYTHONNOUSERSITE="1") == expected


@pytest.mark.parametrize("umask", ["0000", "0022", "0077"])
def test_written_file_has_the_same_bytes_and_permissions(tmp_path: Path, umask: str) -> None:
    spec, output = MANIFESTS / "tiny-llama.cpu.toml", tmp_path / "m.json"
    command = '"$0" -m aotgaudi build manifest "$1" -o "$2"'

    subprocess.run(
        ["/bin/sh", "-c", f"umask {umask}; {command}", sys.executable, str(spec), str(output)],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )

    assert output.read_bytes() == dumps(Manifest.of(load_spec(spec)))
    assert stat.S_IMODE(output.stat().st_mode) == 0o644
