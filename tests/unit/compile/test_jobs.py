"""A job in a worker: what it publishes, that every fault is an error that travels, and that it is done once."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi import errors
from aotgaudi.backends.base import CompiledUnit, Unit
from aotgaudi.backends.fake import probe
from aotgaudi.compile.jobs import (
    Built,
    Busy,
    CompileJob,
    LostTextError,
    build_once,
    find_row,
    is_busy,
    run_compile,
)
from aotgaudi.compile.plan import make_plan
from aotgaudi.compile.run import Progress, Watch, run_plan
from aotgaudi.compile.workers import Done, Job
from aotgaudi.digest import Digest
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import AotGaudiError, CompileError, CorruptError, StoreError
from aotgaudi.store.store import Store
from tests.workload import (
    PoolInThisProcess,
    execute,
    journaled,
    key_of,
    seed,
    seeded_plan,
    text_of,
    tiny_spec,
)


def job_of(
    store: Store, label: str = "head a", key: str | None = None, journal: Path | None = None
) -> CompileJob:
    target = probe() if journal is None else journaled(journal)
    text = str(store.objects.put_bytes(text_of(label).encode()))
    log_path = store.root / "logs" / "unit.log"
    return CompileJob(key or key_of(label, target), text, label, target, store.root, log_path)


class Raising:
    """A compiler that raises, or prints and raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def compile(self, unit: Unit, work_dir: Path) -> CompiledUnit:
        (work_dir / "half").write_bytes(b"half")
        os.write(1, b"out of the compiler\n")
        raise self._error


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr("aotgaudi.backends.offline.make_compiler", lambda target: Raising(error))


def test_the_artifact_is_published_and_the_row_names_it(store: Store) -> None:
    row = run_compile(job_of(store))

    (digest,) = row.artifact.values()
    store.objects.verify(digest)
    assert dict(row.components)["schema"] == "aotgaudi.unit-key/1"
    assert list((store.root / "tmp").iterdir()) == []


def test_equal_units_have_equal_bytes_whatever_they_are_called(store: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "elsewhere")
    job = job_of(other)
    renamed = CompileJob(job.key, job.text, "another label", job.target, job.store_root, job.log_path)

    assert run_compile(job_of(store)).artifact == run_compile(renamed).artifact


class UnpicklableError(Exception):
    """As many libraries have them: cannot be made from its message alone."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code}\nat {where}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnpicklableError(7, where="x"), "head a: UnpicklableError: code 7 at x"),
        (RuntimeError(), "head a: RuntimeError: no message"),
        (SystemExit(3), "head a: SystemExit: 3"),
        (MemoryError(), "head a: MemoryError: no message"),
        (FileNotFoundError(errno.ENOENT, "No such file", "g++"), "head a: [Errno 2] No such file: 'g++'"),
    ],
)
def test_whatever_a_compiler_raises_is_a_compile_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
) -> None:
    raising(monkeypatch, error)

    with pytest.raises(CompileError) as caught:
        run_compile(job_of(store))

    assert str(caught.value) == message
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_is_an_error_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    raising(monkeypatch, OSError(code, os.strerror(code)))

    with pytest.raises(StoreError, match=os.strerror(code)):
        run_compile(job_of(store))


@pytest.mark.parametrize("kind", [CompileError, RuntimeError])
def test_a_compiler_that_says_that_the_disk_is_full_is_an_error_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    raising(
        monkeypatch, kind("head a: CppCompileError\n\nOutput:\ncc1plus: fatal error: No space left on device")
    )

    with pytest.raises(
        StoreError, match=r"^cannot build in .*: No space left on device .*free space there"
    ) as told:
        run_compile(job_of(store))

    assert "\n" not in str(told.value)


def test_the_log_holds_what_the_compiler_printed_and_the_traceback(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, RuntimeError("told so"))
    job = job_of(store)

    with pytest.raises(CompileError):
        run_compile(job)

    log = job.log_path.read_text(encoding="utf-8")
    assert "out of the compiler" in log
    assert "RuntimeError: told so" in log


def test_a_text_that_is_not_what_the_key_says_is_never_compiled(store: Store) -> None:
    with pytest.raises(CorruptError, match="its text has the key"):
        run_compile(job_of(store, key="0" * 64))


def test_a_damaged_text_is_never_compiled(store: Store) -> None:
    job = job_of(store)
    path = store.objects.path(Digest.parse(job.text))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[::-1])

    with pytest.raises(CorruptError):
        run_compile(job)


ALL_ERRORS: list[Callable[[], AotGaudiError]] = [
    lambda: errors.SpecError("limits.x", "is 1", "2"),
    lambda: errors.SpecError("limits.x", "is 1"),
    lambda: errors.RequestError("m", param="p", http_status=404),
    lambda: errors.MissingPackageError("torch", "build"),
    *(
        (lambda cls=cls: cls("m"))
        for cls in vars(errors).values()
        if isinstance(cls, type)
        and issubclass(cls, AotGaudiError)
        and cls not in (errors.SpecError, errors.RequestError, errors.MissingPackageError)
    ),
]


@pytest.mark.parametrize("make", ALL_ERRORS)
def test_every_error_of_ours_survives_pickling(make: Callable[[], AotGaudiError]) -> None:
    error = make()

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert (str(copy), copy.exit_code, vars(copy)) == (str(error), error.exit_code, vars(error))


_BUILD = """
import sys
from pathlib import Path
from aotgaudi.store.store import Store
from tests.workload import execute, seeded_plan
store = Store.open(Path(sys.argv[1]))
execute(store, seeded_plan(store, [[f"head {n}" for n in range(4)]]), 2)
"""


@pytest.mark.process
def test_a_disk_that_fills_up_ends_the_build_with_one_error_and_a_sound_store(store: Store) -> None:
    """The build may write no file as large as a fake artifact."""
    plan = seeded_plan(store, [[f"head {n}" for n in range(4)]])
    before = set(store.objects.digests())

    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(store.root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
        capture_output=True,
        text=True,
        check=False,
    )

    assert "StoreError: " in done.stderr.splitlines()[-1]
    assert "File too large" in done.stderr.splitlines()[-1]
    assert set(store.objects.digests()) == before
    assert list((store.root / "tmp").iterdir()) == []
    for digest in before:
        store.objects.verify(digest)
    assert len(execute(store, plan, 1).compiled) == 4


@pytest.mark.process
def test_a_program_row_for_another_text_is_traced_again_and_the_rest_goes_on(store: Store) -> None:
    spec, entries = tiny_spec(), [DefragEntry(1), DefragEntry(2)]
    seed(store, spec, entries, [("swap a",), ("head b",)])
    plan = seeded_plan(store, [("swap a",), ("head b",)])
    row = plan.programs[0].row
    assert row is not None
    wrong = {key_of("swap a"): {"text": str(Digest.of(text_of("head b").encode())), "label": "swap a"}}
    store.actions.put(plan.programs[0].key.hex, {**row.model_dump(mode="json"), "units": wrong})

    outcome = execute(store, make_plan(entries, spec, probe(), store), 1)

    assert outcome.failures == ()
    assert outcome.num_traced == 1
    assert "head b" in {row.label for row in outcome.compiled}
    assert store.actions.get(key_of("swap a")) is None
    assert make_plan(entries, spec, probe(), store).is_complete


@pytest.mark.process
@pytest.mark.parametrize("is_removed", [False, True], ids=["corrupt", "removed"])
def test_a_unit_whose_text_is_lost_is_traced_and_built_in_the_same_run(
    store: Store, is_removed: bool
) -> None:
    spec, entries = tiny_spec(), [DefragEntry(1)]
    plan = seeded_plan(store, [("swap a", "swap b")])
    for label in ("swap a", "swap b"):
        path = store.objects.path(Digest.of(text_of(label).encode()))
        path.chmod(0o644)
        path.unlink() if is_removed else path.write_bytes(b"!" * path.stat().st_size)

    outcome = execute(store, plan, 2)

    assert outcome.failures == ()
    assert make_plan(entries, spec, probe(), store).is_complete


class LosingPool(PoolInThisProcess):
    """The text of every unit is lost."""

    def submit(self, ticket: int, job: Job) -> None:
        if isinstance(job, CompileJob):
            self._done.append(Done(ticket, error=LostTextError("the text is lost")))
        else:
            super().submit(ticket, job)


def test_a_text_that_is_lost_again_is_a_failure_and_no_loop(store: Store) -> None:
    plan = seeded_plan(store, [("swap a",)])

    outcome = run_plan(plan, tiny_spec(), store, LosingPool(1), Watch())

    assert {failure.message for failure in outcome.failures} == {"the text is lost"}


def test_the_first_compiles_and_records_and_the_second_finds_it(store: Store, tmp_path: Path) -> None:
    job = job_of(store, journal=tmp_path / "journal")

    first, second = build_once(job), build_once(job)

    assert isinstance(first, Built)
    assert isinstance(second, Built)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.row == second.row == find_row(store, job)
    assert (tmp_path / "journal").read_text(encoding="ascii").split() == [job.key]


def test_a_unit_that_another_builder_is_at_is_left_to_it_and_its_log_is_not_touched(store: Store) -> None:
    job = job_of(store)
    job.log_path.parent.mkdir(exist_ok=True)
    job.log_path.write_text("of the other", encoding="ascii")

    with store.locks.try_unit(job.key):
        assert is_busy(store, job)
        assert build_once(job) == Busy()

    assert job.log_path.read_text(encoding="ascii") == "of the other"
    assert not is_busy(store, job)
    assert find_row(store, job) is None


def test_a_failure_is_not_recorded_and_frees_the_lock(store: Store) -> None:
    job = job_of(store, "head !fail")

    for _ in range(2):
        with pytest.raises(CompileError, match="told to fail"):
            build_once(job)

    assert find_row(store, job) is None
    assert not is_busy(store, job)


@pytest.mark.process
def test_a_build_works_on_the_rest_while_another_has_a_unit_and_then_takes_its_result(store: Store) -> None:
    plan = seeded_plan(store, [("layer a", "head b", "head c")])
    seen: list[Progress] = []

    def other() -> None:
        with store.locks.try_unit(key_of("layer a")):
            taken.set()
            deadline = time.monotonic() + 60
            while not any(waits_for_it(progress) for progress in seen) and time.monotonic() < deadline:
                time.sleep(0.01)
            store.actions.put(key_of("layer a"), row)

    def waits_for_it(progress: Progress) -> bool:
        return progress.labels == ("layer a",) and progress.num_done == 2

    outcome_of_other = execute(store, seeded_plan(store, [("layer a",)]), 1)
    row = outcome_of_other.compiled[0].model_dump(mode="json")
    store.actions.discard(key_of("layer a"))
    plan = seeded_plan(store, [("layer a", "head b", "head c")])
    taken = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    outcome = execute(store, plan, 1, on_progress=seen.append)
    thread.join()

    assert Counter(row.label for row in outcome.compiled) == {"head b": 1, "head c": 1}
    assert (outcome.failures, outcome.interrupted) == ((), False)
    assert any(map(waits_for_it, seen)), "it waited, and said for what"
    assert seen[-1].num_done == seen[-1].num_total == 3


@pytest.mark.process
def test_a_builder_that_leaves_without_a_result_is_succeeded(store: Store) -> None:
    plan = seeded_plan(store, [("layer a",)])
    taken = threading.Event()

    def other() -> None:
        with store.locks.try_unit(key_of("layer a")):
            taken.set()
            time.sleep(1.0)

    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    outcome = execute(store, plan, 1)
    thread.join()

    assert [row.label for row in outcome.compiled] == ["layer a"]


@pytest.mark.process
def test_a_stop_while_others_are_at_work_does_not_wait_for_them(store: Store) -> None:
    plan = seeded_plan(store, [("layer a",)])
    seen: list[Progress] = []

    with store.locks.try_unit(key_of("layer a")):
        outcome = execute(store, plan, 1, should_stop=lambda: len(seen) > 3, on_progress=seen.append)

    assert outcome.interrupted
