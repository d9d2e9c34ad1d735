"""What a machine may withhold from any command: one line and an exit code, no traceback, and never silence."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import click
import pytest

from aotgaudi.cli.main import cli
from aotgaudi.compile.plan import make_plan
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Store
from tests.container import can_mount, drop_privileges
from tests.e2e.harness import Workplace, command_line, environment
from tests.e2e.test_container import mounted
from tests.parallel import nightly
from tests.unit.compile.test_read_through import LABELS, MANIFEST, built
from tests.workload import FAKE, seed

__all__ = ["built", "mounted"]
pytestmark = pytest.mark.slow

VERBS: Mapping[tuple[str, ...], str] = {
    ("build", "all"): "{spec} -o {new} --store {store}",
    ("build", "manifest"): "{spec} -o {new}.json",
    ("build", "plan"): "{spec} --store {store}",
    ("build", "cache"): "{spec} --store {store}",
    ("build", "bundle"): "{spec} -o {new} --store {store}",
    ("build", "capture"): "-o {new} --store {store} -- /no/such/server",
    ("build", "image"): "{bundle} -o {new}",
    ("serve",): "--bundle {absent} --model {model} --require-warm",
    ("run",): "--bundle {bundle} -- vllm serve",
    ("model", "import"): "{absent} {new}",
    ("diff",): "{spec} {spec}",
    ("explain",): "{spec} --store {store}",
    ("coverage",): "{spec}",
    ("report",): "{spec} --json",
    ("tune",): "{absent} --from {spec}",
    ("cache", "stats"): "--store {store}",
    ("cache", "gc"): "--max-size 1TB --store {own}",
    ("cache", "fsck"): "--store {store}",
    ("cache", "root", "add"): "name {spec} --store {store}",
    ("cache", "root", "list"): "--store {store}",
    ("cache", "root", "remove"): "absent --store {store}",
    ("push",): "{bundle} docker://a.invalid/b",
    ("pull",): "oci:{absent} -o {new}",
    ("verify",): "{bundle}",
    ("sign",): "{bundle} --sign-key {absent}",
    ("key", "generate"): "{new}",
    ("doctor",): "",
}
"""Each verb, as it is used: where that would take long, with something missing."""


def verbs(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield words
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from verbs(found, (*words, name))


def test_the_table_has_every_verb() -> None:
    assert set(verbs(cli)) == set(VERBS)


@dataclass
class Place:
    """Where commands run, each with names of its own for what it writes."""

    workplace: Workplace
    folder: Path
    store: Path
    names: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def shell(
        self, words: str, redirections: str = "", before: str = ":", prefix: str = "", **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``aotgaudi WORDS`` in a shell, after `before`, behind `prefix`."""
        known = {
            "spec": self.folder / "tiny.toml",
            "bundle": self.workplace.bundle,
            "model": self.workplace.model,
            "store": self.store,
            "own": Store.open(self.folder / "own").root,  # `cache gc` refuses one that others use.
            "new": self.folder / f"new-{next(self.names)}",
            "absent": self.folder / "absent",
        }
        command = shlex.join(command_line(*words.format_map(known).split()))
        return subprocess.run(
            ["bash", "-c", f"{before}; {prefix} {command} {redirections}"],
            cwd=self.folder,
            env=environment(self.folder / "cache", **changes),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def place(workplace: Workplace, built: Store, tmp_path: Path) -> Place:
    return Place(workplace, tmp_path, built.root)


def is_told(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether it ended with a code of ours, and said why in one line."""
    said = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    return done.returncode in (2, 4, 5, 6) and len(said) == 1 and "Traceback" not in done.stderr


LOST, MUTE, NEITHER = ">/dev/full", "2>&-", "<&- >&- 2>&-"


def test_every_verb_says_that_it_cannot_print_and_works_where_nobody_listens(place: Place) -> None:
    def faults(verb: tuple[str, ...]) -> list[str]:
        run = partial(place.shell, " ".join((*verb, VERBS[verb])))
        usual = run()
        found = [] if "Traceback" not in usual.stderr else [f"{verb}: {usual.stderr}"]
        for redirections in (LOST, MUTE, NEITHER):
            done = run(redirections)
            is_lost = bool(usual.stdout) and redirections != MUTE
            codes = {usual.returncode or 2, 2} if is_lost else {usual.returncode}
            is_silent = redirections == LOST and is_lost and "standard output cannot" not in done.stderr
            if done.returncode not in codes or "Traceback" in done.stderr or is_silent:
                found.append(f"{verb} {redirections}: {usual.returncode}, {done.returncode} {done.stderr}")
        return found

    with ThreadPoolExecutor(4) as pool:
        assert not [fault for found in pool.map(faults, VERBS) for fault in found]


@pytest.mark.parametrize("words", ["--help", *nightly("nothing")])
def test_what_click_prints_is_no_exception(place: Place, words: str) -> None:
    for stdin, stdout, stderr in product(("", "<&-"), ("", ">&-", ">/dev/full"), ("", "2>&-", "2>/dev/full")):
        done = place.shell(words, f"{stdin} {stdout} {stderr}")

        assert done.returncode == (2 if stdout or words == "nothing" else 0)
        assert "Traceback" not in done.stderr
        assert bool(done.stderr) is (not stderr and bool(stdout or words == "nothing"))


def test_a_pipe_that_nobody_reads_is_told(place: Place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command_line("--help"), stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)

    assert is_told(done)
    assert "Broken pipe" in done.stderr


def test_what_is_printed_goes_into_no_file_that_is_opened_instead_of_a_closed_stream(
    place: Place, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "another")
    seed(store, MANIFEST.spec, MANIFEST.entries, LABELS)

    done = place.shell(f"build cache {{spec}} --store {store.root} -j 1", "<&- >&- 2>&-")

    assert done.returncode == 2
    report = check_store(store)
    assert (report.damage, report.losses) == ((), ())
    assert make_plan(MANIFEST.entries, MANIFEST.spec, FAKE, store).is_complete


WITHHELD = {
    "working directory": ("mkdir gone; cd gone; rmdir ../gone", "", {2}),
    "/proc": (":", "unshare -m bash -c 'mount -t tmpfs none /proc; exec \"$@\"' --", {2, 5}),
    "/dev": (":", "unshare -m bash -c 'mount -t tmpfs none /dev; exec \"$@\"' --", {0, 2, 5, 6}),
    "memory": ("ulimit -v 200000", "", {0, 2, 6}),
}


@pytest.mark.parametrize("what", WITHHELD)
@pytest.mark.parametrize(
    "words",
    [
        "verify {bundle}",
        "serve --bundle {bundle} --model {model} --require-warm --port 0 --host nowhere.invalid",
        "doctor",
        *nightly(
            "cache stats --store {store}",
            "build plan {spec} --store {store}",
            "explain {spec} --store {store}",
        ),
    ],
)
def test_what_is_withheld_is_told_in_a_line(place: Place, words: str, what: str) -> None:
    before, prefix, codes = WITHHELD[what]
    if prefix and not can_mount():
        pytest.skip("needs mount namespaces")

    done = place.shell(words, before=before, prefix=prefix)

    assert "Traceback" not in done.stderr
    assert is_told(done) or done.returncode == 0
    assert done.returncode in {*codes, 0}


@pytest.mark.parametrize("most", [1, 4, *nightly(2, 8)])
def test_a_limit_on_processes_is_told(place: Place, mounted: Path, most: int) -> None:
    """The kernel counts the processes and threads of a user, so it has to be one that has no others."""
    user = shlex.join(drop_privileges(uid=54_000 + most))
    words = f"serve --bundle {mounted / 'bundle'} --model {mounted / 'model'} --require-warm --port 0"

    done = place.shell(words, before="cd /", prefix=f"{user} bash -c 'ulimit -u {most}; exec \"$@\"' --")

    assert "Traceback" not in done.stderr
    assert done.returncode != 0
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_ENDPOINT", "hub.example"),
        ("HF_ENDPOINT", "http://[::1"),
        ("HF_HUB_ETAG_TIMEOUT", "soon"),
        ("HTTPS_PROXY", "nonsense://x"),
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("SSL_CERT_FILE", "/no/such/file"),
    ],
)
def test_a_setting_that_leads_nowhere_is_named(place: Place, name: str, value: str) -> None:
    words = "model import org/name {new}"

    done = place.shell(words, HF_HUB_OFFLINE="0", HF_HOME=str(place.folder), **{name: value})

    assert is_told(done), done.stderr
    assert done.stdout == ""
    assert f"the environment sets {name}" in done.stderr or f", {name}" in done.stderr
