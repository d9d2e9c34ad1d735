"""A probe's process: what it told, what it died of, and that it is ended when its time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from aotgaudi.doctor.hpu.lab import Lab, Outcome, ProbeFailedError, ProbeProcess, start_process
from aotgaudi.gaudi.environment import CACHE_VARIABLE

pytestmark = pytest.mark.process


class Script:
    """A process that runs a line of Python in a probe's place; it has ``argv`` as a probe has."""

    def __init__(self, line: str) -> None:
        self._line = line
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ProbeProcess:
        command = [sys.executable, "-c", f"import json, os, sys, time; {self._line}", *arguments]
        self.processes.append(subprocess.Popen(command, env=dict(environment), start_new_session=True))
        return self.processes[-1]


def telling(problem: str) -> Script:
    return Script(f"json.dump({{'values': {{}}, 'problem': {problem!r}}}, open(sys.argv[3], 'w'))")


def ran(tmp_path: Path, line: str, seconds: float = 30.0, **arguments: object) -> Outcome:
    lab = Lab(tmp_path, environment={"RANK": "3"}, module_id=2, seconds=seconds, start=Script(line).start)
    return lab.run("a.probe", **arguments)  # type: ignore[arg-type]


def test_what_a_probe_tells_is_its_outcome(tmp_path: Path) -> None:
    tell = "json.dump({'values': {'argv': sys.argv[1:3], 'env': dict(os.environ)}, 'problem': ''}, open(sys.argv[3], 'w'))"

    outcome = ran(tmp_path, tell, number=7)

    assert outcome.is_whole
    assert outcome.values["argv"] == ["a.probe", '{"number": 7}']
    environment = outcome.values["env"]
    assert environment["HLS_MODULE_ID"] == environment["HABANA_VISIBLE_MODULES"] == "2"
    assert environment[CACHE_VARIABLE].endswith(",false,0")
    assert "RANK" not in environment


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sys.exit(3)", "it ended with exit status 3"),
        ("os.abort()", "it ended with SIGABRT"),
        ("pass", "it ended without a result"),
        ("open(sys.argv[3], 'w').write('{')", "it ended without a result"),
        ("json.dump({'values': {}, 'problem': 'ValueError: no'}, open(sys.argv[3], 'w'))", "ValueError: no"),
    ],
)
def test_a_probe_without_an_end_of_its_own_has_a_problem(tmp_path: Path, line: str, problem: str) -> None:
    assert ran(tmp_path, line) == Outcome({}, problem)


def test_a_probe_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    script = Script("time.sleep(600)")

    outcome = Lab(tmp_path, environment={}, seconds=0.2, start=script.start).run("a.probe")

    assert outcome.problem == "it took more than 0.2 s"
    assert script.processes[0].wait(30) != 0


def test_a_probe_ends_with_a_doctor_that_ends_before_it_knows_the_probe(tmp_path: Path) -> None:
    """As a signal may end it. The probe would wait for ever: nobody reads what it tells."""
    os.mkfifo(tmp_path / "result")
    code = (
        "import os, sys; from aotgaudi.doctor.hpu.lab import start_process;"
        "words = ['a.probe', '{}', sys.argv[1]];"
        "print(start_process(words, os.environ).pid, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "result")]

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    _, left = psutil.wait_procs(processes(done.stdout), timeout=30)
    for process in left:
        process.kill()
    assert left == []


def processes(printed: str) -> list[psutil.Process]:
    """The process that was told by its id, if it has not ended."""
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(int(printed))]
    return []


@pytest.mark.parametrize(("patience", "num_asked"), [(0.0, 1), (60.0, 2)])
def test_a_busy_card_is_asked_for_again_while_there_is_patience(
    tmp_path: Path, patience: float, num_asked: int
) -> None:
    busy = "'' if os.path.exists('asked') else 'RuntimeError: Device acquire failed.'"
    script = Script(
        f"os.chdir({str(tmp_path)!r}); problem = {busy}; open('asked', 'w');"
        "json.dump({'values': {}, 'problem': problem}, open(sys.argv[3], 'w'))"
    )
    lab = Lab(tmp_path, environment={}, patience_seconds=patience, start=script.start)

    outcome = lab.run("device.identity")

    assert outcome.is_whole == (num_asked == 2)
    assert len(script.processes) == num_asked


@pytest.mark.parametrize("problem", ["Device acquire failed. No devices found.", "it broke"])
def test_nothing_else_is_asked_for_again(tmp_path: Path, problem: str) -> None:
    script = telling(f"RuntimeError: {problem}")

    outcome = Lab(tmp_path, environment={}, patience_seconds=60.0, start=script.start).run("a.probe")

    assert problem in outcome.problem
    assert len(script.processes) == 1


def test_what_a_probe_saw_is_required_or_why_it_saw_nothing() -> None:
    assert Outcome({"a": 1}).required() == {"a": 1}
    with pytest.raises(ProbeFailedError, match="it took more than 5 s"):
        Outcome({}, "it took more than 5 s").required()


def test_a_real_probe_without_the_bridge_tells_why(tmp_path: Path) -> None:
    result = tmp_path / "result"
    words = ["nowhere.probe", "{}", str(result)]

    start_process(words, {"PATH": "/usr/bin"}).wait()

    assert json.loads(result.read_bytes())["problem"].startswith("ModuleNotFoundError")


def test_what_is_kept_is_made_once(tmp_path: Path) -> None:
    lab, made = Lab(tmp_path, environment={}), []

    for _ in range(2):
        assert lab.kept("name", lambda: made.append(1) or len(made)) == 1  # type: ignore[func-returns-value]
