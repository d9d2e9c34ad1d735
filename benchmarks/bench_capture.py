"""A real vLLM, captured, run from its capture, and refused: what docs/benchmarks.md says of wrapped servers.

``python benchmarks/bench_capture.py --guest build/guests/vllm/bin/python --model .aotgaudi/models/smollm2-135m --work WORK``

It takes more than half an hour on two cores. Each part leaves what it measured in WORK, and is not measured again while that
is there: ``--parts run,refused`` does some of them only; the result is written of all that is there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, Table, command, environment, finish, make_parser, verdict, wait_until

INIT = re.compile(rb"init engine .* took ([0-9.]+) s")
FLAGS = (
    "--max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 512 --dtype bfloat16 --served-model-name m"
)
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "min_p": 0.05},
    {"temperature": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "n": 2, "logprobs": 1},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {"5": 2}},
)
NOTE = (
    "Process start to /health (plain) or to /ready (after the exercise); the supervisor's own start is in it."
)
STEADY_SECONDS = 600
TARGET_READY, TARGET_INIT, TARGET_REFUSED, TARGET_BYTES, TARGET_AGAIN = 0.55, 10.0, 0.5, 1.0, 1.0


@dataclass(frozen=True)
class Bench:
    """Where things are."""

    guest: Path
    model: Path
    work: Path
    place: Path
    store: Path

    @property
    def bundle(self) -> Path:
        return self.work / "a.bundle"

    def version(self) -> str:
        """Returns the version of the vLLM that is installed there."""
        code = "from importlib.metadata import version; print(version('vllm'))"
        return subprocess.check_output([self.guest, "-c", code], text=True).strip()

    def read(self, part: str) -> dict[str, Any]:
        """Returns what a part measured, without the folders of this machine."""
        text = (self.work / f"{part}.json").read_text()
        places = ((self.place, "ROOT"), (self.store, "STORE"), (self.work, "WORK"), (self.model, "MODEL"))
        for path, name in (*places, (self.guest.parent, "GUEST")):
            text = text.replace(str(path), name)
        told: dict[str, Any] = json.loads(re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1...", text))
        return told

    def words(self, port: int, *more: str, model: Path | None = None) -> list[str]:
        served = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model or self.model)]
        return [str(self.guest), *served, *FLAGS.split(), "--port", str(port), "--host", "127.0.0.1", *more]

    def run_words(self, *options: str, bundle: Path | None = None) -> list[str]:
        place = ["--root", str(self.place), "--listen", "127.0.0.1:0"]
        return command("run", "--bundle", str(bundle or self.bundle), *place, *options)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--guest", type=Path, required=True, help="the interpreter of a vLLM")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--root", type=Path, help="where the server's caches lie [default: WORK/place]")
    parser.add_argument("--store", type=Path, help="[default: WORK/store]")
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    guest = args.guest.parent.resolve() / args.guest.name  # The link itself: behind it is no environment.
    work = args.work.resolve()
    bench = Bench(
        guest, args.model.resolve(), work, args.root or work / "place", args.store or work / "store"
    )
    for name in args.parts.split(","):
        done = bench.work / f"{name}.json"
        if not done.exists():
            print(f"== {name}", flush=True)
            found = {**PARTS[name](bench), "load_average": os.getloadavg()[0]}
            done.write_text(json.dumps(found, indent=1))
            print(json.dumps(found, indent=1), flush=True)
    found = {n: bench.read(n) for n in PARTS if (bench.work / f"{n}.json").exists()}
    machine = {**environment(), "guest": bench.version()}
    finish("capture", args, machine, found, [*tables(found, f"vLLM {machine['guest']}. {NOTE}")])


# Parts


def capture(bench: Bench) -> dict[str, Any]:
    """Builds: cold run, proof, seal; then the same again."""
    key = bench.work / "key.pem"
    if not key.exists():
        call(command("key", "generate", str(key)))
    build = ["build", "capture", "-o", str(bench.bundle), "--root", str(bench.place), "--sign-key", str(key)]
    arguments = command(*build, "--store", str(bench.store), "--", *bench.words(18800))
    seconds, code, output = call(arguments, timeout=3600)
    if code:
        sys.exit(output)
    shutil.rmtree(bench.bundle)
    again, _, said = call(arguments)
    cold, proof = (float(x) for x in re.findall(r"ready in ([0-9.]+) s", output))
    lines = [line for line in output.splitlines() if re.match(r"(1 cold|2 proof) +ready|sealed", line)]
    return {"seconds": seconds, "cold_seconds": cold, "proof_seconds": proof, "lines": lines,
            "again_seconds": again, "again": said.splitlines()[-1]}  # fmt: skip


def plain(bench: Bench) -> dict[str, Any]:
    """The server by itself: cold, then warm from its own cache."""
    cache = bench.work / "plain"
    shutil.rmtree(cache, ignore_errors=True)
    found: dict[str, Any] = {}
    for name in ("cold", "warm"):
        with serving(bench.words(18801), cache, lambda port, log: answers(18801, "/health")) as server:
            found[f"{name}_seconds"], found[f"{name}_init_seconds"] = (
                server.ready_seconds,
                server.init_seconds(),
            )
            ask(18801, ASKED[4])
    found["regenerated"] = b"Compiling model again" in server.log.read_bytes()
    return found


def run(bench: Bench) -> dict[str, Any]:
    """From the capture, warm; then 200 mixed requests, four at once; then SIGTERM with requests in flight."""
    arguments = [*bench.run_words("--require-warm", "--trusted-key", str(bench.work / "key.pem.pub")), "--"]
    # By itself vLLM aborts what is in flight when it is told to end.
    words = [*arguments, *bench.words(18802, "--shutdown-timeout", "60")]
    with serving(words, bench.work / "home", is_ready) as server:
        found = server.told()
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(lambda i: ask(18802, ASKED[i % len(ASKED)]), range(200)))
        found["requests"] = {str(s): statuses.count(s) for s in set(statuses)}
        found["requests_seconds"] = time.perf_counter() - started
        found["compilations_after"] = server.compilations()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            flying = [pool.submit(ask, 18802, {"temperature": 0, "max_tokens": 64}) for _ in range(2)]
            time.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            found["in_flight"] = [flight.result() for flight in flying]
        found["exit_code"] = server.process.wait(120)
    found["orphans"] = len(processes_at(bench.place))
    return found


def elsewhere(bench: Bench) -> dict[str, Any]:
    """Another path of the model, another folder, home, user name, port and log level: still warm."""
    link, home = bench.work / "elsewhere" / "the-model", bench.work / "other-home"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(bench.model)
    variables = {"LOGNAME": "somebody", "USER": "somebody", "VLLM_LOGGING_LEVEL": "INFO", "HOME": str(home)}
    words = [
        *bench.run_words("--require-warm"),
        "--",
        *bench.words(18803, "--uvicorn-log-level", "warning", model=link),
    ]
    with serving(words, home, is_ready, variables, cwd=link.parent) as server:
        return server.told()


def refused(bench: Bench) -> dict[str, Any]:
    """What is refused before the server starts, how fast, and by which sentence."""
    found: dict[str, Any] = {}

    def attempt(name: str, *options: str, words: list[str] | None = None, bundle: Path | None = None) -> None:
        run_words = bench.run_words("--require-warm", *options, bundle=bundle)
        found[name] = attempted([*run_words, "--", *(words or bench.words(18805))])

    attempt("a changed flag", words=bench.words(18805, "--max-num-batched-tokens", "1024"))
    attempt("another model configuration", words=bench.words(18805, model=changed_model(bench)))
    for name, suffix in (("a byte of a library", ".so"), ("a line in a .py", ".py")):
        attempt(name, bundle=damaged(bench, suffix))
    other = bench.work / "other.pem"
    if not other.exists():
        call(command("key", "generate", str(other)))
    attempt("another key", "--trusted-key", str(bench.work / "other.pem.pub"))
    found["floor"] = attempted(command("--version"))
    return found


def attempted(arguments: list[str]) -> dict[str, Any]:
    """What a command said that ends at once: the fastest of three times, and its CPU seconds."""
    tries = []
    for _ in range(3):
        before = child_seconds()
        seconds, code, output = call(arguments, timeout=120)
        tries.append((seconds, child_seconds() - before, code, last_line(output)))
    seconds, cpu, code, sentence = min(tries)
    return {"seconds": seconds, "cpu_seconds": cpu, "exit_code": code, "sentence": sentence}


def steady(bench: Bench) -> dict[str, Any]:
    """Ten minutes of mixed requests, one after the other: nothing is compiled, and memory stays as it is."""
    words = [*bench.run_words("--require-warm"), "--", *bench.words(18807)]
    with serving(words, bench.work / "home", is_ready) as server:
        found = server.told()
        until, weights, statuses = time.monotonic() + STEADY_SECONDS, [], []
        while time.monotonic() < until:
            statuses += [ask(18807, ASKED[i % len(ASKED)]) for i in range(len(ASKED))]
            weights.append(resident_bytes(bench.place) / 1e6)
        tenth = max(1, len(weights) // 10)
        found["requests"] = {str(s): statuses.count(s) for s in set(statuses)}
        found["megabytes"] = [round(median(weights[i : i + tenth])) for i in range(0, len(weights), tenth)]
        found["compilations_after"] = server.compilations()
    return found


def image(bench: Bench) -> dict[str, Any]:
    """As an image to a registry on loopback, back from there, and run."""
    pulled, key = bench.work / "pulled.bundle", bench.work / "key.pem.pub"
    shutil.rmtree(pulled, ignore_errors=True)
    with registry(bench.work / "registry") as host:
        pushed = call(command("push", str(bench.bundle), f"docker://{host}/captured:1", "--insecure"))
        got = call(
            command(
                "pull",
                f"docker://{host}/captured:1",
                "-o",
                str(pulled),
                "--insecure",
                "--trusted-key",
                str(key),
            )
        )
    if pushed[1] or got[1]:
        sys.exit(pushed[2] + got[2])
    options = bench.run_words("--require-warm", "--trusted-key", str(key), bundle=pulled)
    with serving([*options, "--", *bench.words(18810)], bench.work / "home", is_ready) as server:
        return {"push_seconds": pushed[0], "pull_seconds": got[0], **server.told()}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "capture": capture,
    "plain": plain,
    "run": run,
    "elsewhere": elsewhere,
    "refused": refused,
    "steady": steady,
    "image": image,
}


def changed_model(bench: Bench) -> Path:
    """A model directory with the same weights and another configuration."""
    folder = bench.work / "changed-model"
    if not folder.exists():
        shutil.copytree(bench.model, folder, copy_function=os.link)
        (folder / "config.json").unlink()
        config = json.loads((bench.model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    return folder


def damaged(bench: Bench, suffix: str) -> Path:
    """A copy of the bundle in which one captured file has another byte, or another line."""
    folder = bench.work / f"damaged{suffix}.bundle"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bench.bundle, folder)
    receipt = json.loads((folder / "receipt.json").read_text())
    digest = next(f["digest"] for f in receipt["files"] if f["path"].endswith(suffix)).split(":")[1]
    (path,) = (path for path in (folder / "objects").rglob("*") if path.is_file() and path.name == digest)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    if suffix == ".so":
        data[len(data) // 2] ^= 1
    else:
        data += b"\nprint('it ran')\n"
    path.write_bytes(data)
    path.chmod(0o444)
    return folder


# Processes


def variables(home: Path) -> dict[str, str]:
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {
        **kept,
        **offline,
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "OMP_NUM_THREADS": "2",
    }


def call(arguments: list[str], timeout: float = 600) -> tuple[float, int, str]:
    """Runs a process to its end: seconds, exit code, output."""
    home = Path(os.environ.get("TMPDIR", "/tmp")) / "bench-capture-home"
    started = time.perf_counter()
    done = subprocess.run(
        arguments, env={**variables(home)}, cwd=ROOT, timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return time.perf_counter() - started, done.returncode, done.stdout


@dataclass
class Serving:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    log: Path
    started: float
    port: int = 0
    ready_seconds: float = 0.0

    def init_seconds(self) -> float | None:
        found = INIT.findall(self.log.read_bytes())
        return float(found[-1]) if found else None

    def metrics(self) -> list[str]:
        return get(self.port, "/metrics")[1].splitlines()

    def compilations(self) -> dict[str, float]:
        """Those that are not 0, by labels."""
        lines = (
            line.rpartition(" ") for line in self.metrics() if line.startswith("aotgaudi_compilations_total{")
        )
        return {name.partition("{")[2].rstrip("}"): float(value) for name, _, value in lines if float(value)}

    def told(self) -> dict[str, Any]:
        """What it says of itself when it is ready."""
        wanted = (
            "verify_seconds|restore_seconds|guest_ready_seconds|guest_warm|guest_artifacts|witness_processes"
        )
        lines = (line.rpartition(" ") for line in self.metrics() if re.match(f"aotgaudi_({wanted})", line))
        said = {name: float(value) for name, _, value in lines}
        return {"ready_seconds": self.ready_seconds, "init_seconds": self.init_seconds(), **said,
                "compilations": self.compilations()}  # fmt: skip


@contextmanager
def serving(
    words: list[str],
    home: Path,
    is_up: Callable[[int, Path], int],
    more: dict[str, str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[Serving]:
    """Starts a server, and waits until `is_up` gives its port; ends it, and what it left, afterwards."""
    log = home.parent / f"{home.name}.log"
    with log.open("wb") as sink:
        server = Serving(
            subprocess.Popen(
                words,
                env={**variables(home), **(more or {})},
                cwd=cwd,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            ),
            log,
            time.perf_counter(),
        )
    try:
        while not (port := is_up(server.port, log)):
            if server.process.poll() is not None or time.perf_counter() - server.started > 1500:
                sys.exit(f"not ready: {server.process.poll()}\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        server.port, server.ready_seconds = port, time.perf_counter() - server.started
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


def is_ready(port: int, log: Path) -> int:
    """Returns the supervisor's port once its /ready is 200; it tells the port in its log."""
    found = re.search(rb"http://127\.0\.0\.1:(\d+): /ready", log.read_bytes())
    return int(found[1]) if found and answers(int(found[1]), "/ready") else 0


def answers(port: int, path: str) -> int:
    try:
        return port if get(port, path)[0] == 200 else 0
    except OSError:
        return 0


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def ask(port: int, parameters: dict[str, Any]) -> int:
    """Asks for a completion; returns its status, 0 where the connection broke."""
    body = {"model": "m", "prompt": "The capital of Italy is", "max_tokens": 8, **parameters}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return response.status
    finally:
        connection.close()


def processes_at(place: Path) -> list[int]:
    """The processes whose witness writes below `place`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"AOTGAUDI_WITNESS={place}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def resident_bytes(place: Path) -> int:
    """The proportional resident memory of all of the guest's processes (proc(5), smaps_rollup)."""
    found = 0
    for pid in processes_at(place):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += 1024 * int(re.search(r"^Pss: +(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    return found


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """An empty docker-registry on loopback; yields its address."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    config = f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder}\nhttp:\n  addr: {host}\n"
    (folder / "config.yml").write_text(config)
    process = subprocess.Popen(
        ["docker-registry", "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: bool(answers(int(host.rpartition(":")[2]), "/v2/")), "the registry")
        yield host
    finally:
        process.terminate()
        process.wait()


def child_seconds() -> float:
    """The CPU time of all children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("error")] or output.strip().splitlines()
    return lines[-1] if lines else ""


# Tables


def tables(found: dict[str, Any], note: str) -> Iterator[Table]:
    """What of the parts that were measured is shown."""
    starts = [row for row in _starts(found) if row]
    if starts:
        columns = ("start", "ready", "init engine", "compiled, generated", "load average")
        yield Table("A vLLM on CPU, by where its code comes from", columns, tuple(starts), note)
    if "refused" in found:
        yield Table(
            "Refused before anything starts",
            ("what", "exit code", "seconds", "of CPU", "target", "said"),
            _refusals(found),
            f"The fastest of three; load average {found['refused']['load_average']:.0f}.",
        )
    checks = tuple(_checks(found))
    if checks:
        yield Table("Held against its promises", ("what", "found", "target"), checks)


def _starts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if plain := found.get("plain"):
        for name, told in (("plain, empty cache", "cold"), ("plain, its own cache", "warm")):
            generated = "all" if told == "cold" or plain["regenerated"] else "nothing"
            yield _start(name, plain[f"{told}_seconds"], plain[f"{told}_init_seconds"], generated, plain)
    for part, name in (("run", "`run --require-warm`"), ("elsewhere", "the same, elsewhere")):
        if told := found.get(part):
            made = ", ".join(f"{n}: {c:g}" for n, c in told["compilations"].items() if "trace" not in n)
            yield _start(name, told["ready_seconds"], told["init_seconds"], made or "nothing", told)


def _start(name: str, ready: float, init: float | None, made: str, part: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{ready:.1f} s",
        "-" if init is None else f"{init:.1f} s",
        made,
        f"{part['load_average']:.1f}",
    )


def _refusals(found: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for name, told in found["refused"].items():
        if not isinstance(told, dict):
            continue
        target = TARGET_BYTES if told["exit_code"] == 4 else TARGET_REFUSED
        judged = "" if name == "floor" else verdict(round(told["seconds"], 2), target)
        label = "(`aotgaudi --version`)" if name == "floor" else name
        rows.append(
            (
                label,
                str(told["exit_code"]),
                f"{told['seconds']:.2f}",
                f"{told['cpu_seconds']:.2f}",
                judged,
                told["sentence"][:150],
            )
        )
    return tuple(rows)


def _checks(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What was found of each part, beside its target where there is one."""
    if told := found.get("capture"):
        for line in told["lines"]:
            yield "`build capture`", line, ""
        again = verdict(round(told["again_seconds"], 2), TARGET_AGAIN)
        yield "the same build again", f"{told['again_seconds']:.2f} s", again
    if "plain" in found and "run" in found:
        plain, run = found["plain"], found["run"]
        ready = run["ready_seconds"] / plain["cold_seconds"]
        init = plain["cold_init_seconds"] / run["init_seconds"]
        yield "restored / cold, ready", f"{ready:.2f}", verdict(round(ready, 2), TARGET_READY)
        judged = verdict(round(init, 1), TARGET_INIT, at_least=True)
        yield "cold / restored, init engine", f"{init:.1f} x", judged
    for part, row in SAYINGS.items():
        if told := found.get(part):
            for name, text in row(told):
                yield name, text, ""


def _run(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    restored = told.get("aotgaudi_verify_seconds", 0) + told.get("aotgaudi_restore_seconds", 0)
    yield "verify, compare and restore", f"{restored:.2f} s"
    asked = f"{told['requests']}, compiled: {told['compilations_after'] or 0}"
    yield "200 mixed requests, 4 at once", asked
    ended = f"{told['in_flight']}, exit code {told['exit_code']}, orphans: {told['orphans']}"
    yield "SIGTERM with 2 in flight", ended


def _steady(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    compiled, weights = told["compilations_after"] or 0, told["megabytes"]
    yield (
        "ten minutes of mixed requests",
        f"{told['requests']}, compiled: {compiled}; MB by tenths: {weights}",
    )


def _image(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seconds = f"push {told['push_seconds']:.1f} s, pull {told['pull_seconds']:.1f} s"
    ready = f"ready in {told['ready_seconds']:.1f} s, compiled: {told['compilations'] or 0}"
    yield "as an image to a registry and back", f"{seconds}; {ready}"


SAYINGS: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, str]]]] = {
    "run": _run,
    "steady": _steady,
    "image": _image,
}


if __name__ == "__main__":
    main()
