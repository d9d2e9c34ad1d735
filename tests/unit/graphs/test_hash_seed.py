"""Unit texts do not depend on the hash seed of the process that traces them: transformers walks sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.models import ARCHITECTURES
from tests.parallel import nightly

pytestmark = pytest.mark.process

_TRACE = """
import json, sys
from aotgaudi.graphs.trace import trace
from tests.integration.models import reference, spec_of
from tests.integration.test_right_answers import CHUNK, DECODE, SWAP
found = {}
for name in sys.argv[1:]:
    spec = spec_of(reference(name))
    traced = [trace(entry, spec.model, spec.limits) for entry in (CHUNK, DECODE, SWAP)]
    found[name] = [[(piece.text, piece.inputs, piece.outputs) for piece in each.pieces] for each in traced]
    found[name].append([[spec.name for spec in each.weights] for each in traced])
    found[name].append([(each.constants or b"").hex() for each in traced])
json.dump(found, sys.stdout)
"""


DAILY = ("llama", "gemma3_text", "gpt_oss", "deepseek_v4")


def _traced_with(seed: str, architectures: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", _TRACE, *architectures], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def traced(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """The architectures that are asked for, traced in two processes whose sets have another order."""
    asked = [each for each in request.session.items if isinstance(each, pytest.Function)]
    names = [each.callspec.params["architecture"] for each in asked if each.module is request.module]
    processes = [_traced_with(seed, names) for seed in ("0", "1")]
    found = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(text) for text in found]


@pytest.mark.parametrize(
    "architecture",
    [*DAILY, *nightly(*sorted(set(ARCHITECTURES) - set(DAILY)))],
)
def test_two_seeds_give_equal_programs(traced: list[dict[str, object]], architecture: str) -> None:
    one, other = traced

    assert one[architecture] == other[architecture]
