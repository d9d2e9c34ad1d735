"""A server that is not ours, for tests: it compiles into a cache as vLLM does, and misbehaves on request. Stdlib only.

::

    fake_server.py serve MODEL [--host H] [--port N] [--workers N] [--max-num-seqs N] [--max-model-len N]
                               [--served-model-name X] [--log-level X] [--data-parallel-size N]
                               [--api-server-count N] [--ssl-certfile F --ssl-keyfile F]
    FAKE_CACHE_ROOT   its cache: <hash of what decides the code>/rank_N/{model, wrapper.py, kernels/*.so}
    FAKE_FORCE_LOAD   1: an artifact that does not load ends the server
    FAKE_PLUGINS_GROUP  whose plugins its processes load, in place of vLLM's
    FAKE_FAULTS       names of FAULTS, separated by commas; NAME@FILE: only where FILE is there; NAME#1: only in what is of
                      data-parallel rank 1, or in API server 1

Three kinds of process, each of which loads the plugins of ``vllm.general_plugins``: the API server (this one), an
EngineCore and its workers, which compile and load. With several data-parallel ranks there are several engines, a
coordinator that loads no plugins, and by default as many API servers, which this one then starts. A request with
``logprobs`` needs a kernel of its own, which is compiled on the first such request. The files hold the cache's path, and
the hash has the model's. All of that is as in vLLM 0.32.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

HERE = Path(__file__).resolve().parent
STANDINS = HERE / "standins"
FAULTS = {
    "silent-miss": "makes all its code again at start, without running a compiler",
    "load-failure": "its artifact does not load: it compiles again, or ends under FAKE_FORCE_LOAD",
    "eager": "its artifact is not loaded, and nothing is compiled instead",
    "compile-at-start": "runs a compiler once more at start",
    "compile-live": "runs a compiler for every request",
    "rewrite": "another program writes to a file of its cache at start",
    "rewrite-live": "the same, on the first request",
    "delete": "removes a file of its cache at start",
    "plant": "another program puts a library into its cache at start",
    "plant-and-load": "the same, and it is loaded",
    "counts-wrong": "its own counter says that it compiled",
    "wrong-answer": "answers otherwise than it did",
    "skip-plugin": "its workers load no plugins",
    "skip-plugins": "no process loads plugins",
    "skip-api-plugins": "an API server that another process started loads no plugins",
    "no-coordinator": "the ranks' coordinator is not started",
    "other-certificate": "shows the certificate in the given file, whose key lies beside it",
    "crash-at-start": "ends with exit code 13 before it answers",
    "killed-at-start": "dies of SIGSEGV before it answers",
    "crash-live": "ends with exit code 13 on the first request",
    "worker-dies": "a worker dies of SIGKILL at start, and it goes on without",
    "hang": "never answers, and ignores SIGTERM",
    "hang-at-end": "ignores SIGTERM",
    "orphan": "leaves a process in a session of its own",
    "leak-secret": "writes the value of $FAKE_TOKEN into its cache",
    "link": "puts a symbolic link into its cache",
    "slow": "takes two seconds more to start",
    "slow-answers": "takes two seconds for each answer",
    "deaf-at-start": "takes two seconds more to start, and ignores SIGTERM until it serves",
    "refuses-requests": "answers every request with 400",
    "refuses-json": "answers requests for JSON with 400",
    "swap-cache": "another program puts another cache in place of it for a moment, at start",
    "plant-beside-agent": "another program puts a sitecustomize.py beside the agent at start",
    "builds-by-script": "a script of its runs a compiler at start, below its model's directory",
    "loads-what-it-made": "a program that is no known compiler makes a library there, and it is loaded",
    "probes": "probes its cache's folders, at start and in each request, and leaves nothing",
    "keeps-a-lock": "holds a lock, by a file of its cache that stays and has no name of a lock",
    "runs-what-it-removes": "maps a library of its cache in C code, and removes the file",
    "loads-from-memory": "loads a library from a memfd",
    "loads-from-shm": "loads a library from /dev/shm that it made",
    "order-matters": "compiles anew, each time, for a request with logprobs that comes before any with a bias",
    "raises-at-start": "ends with exit code 1 and a message, in order, before it has loaded anything",
}
KERNELS = ("embedding", "layer")
KINDS = ("logprobs", "tools", "input", "response_format")
"""Members of a request that need a kernel of their own."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
TICK_SECONDS = 0.02


def has(fault: str) -> bool:
    """Whether to misbehave in this way, now."""
    for word in filter(None, os.environ.get("FAKE_FAULTS", "").split(",")):
        where, _, rank = word.partition("#")
        name, _, file = where.partition("@")
        if rank and rank != os.environ.get("FAKE_RANK"):
            continue
        if name not in FAULTS:
            raise SystemExit(f"no such fault: {name}")
        if name == fault and (not file or Path(file).exists()):
            return True
    return False


def load_plugins() -> None:
    """What vLLM does first in each process (vllm/plugins/__init__.py)."""
    if not has("skip-plugins"):
        group = os.environ.get("FAKE_PLUGINS_GROUP", "vllm.general_plugins")
        for plugin in importlib.metadata.entry_points(group=group):
            plugin.load()()


def say(text: str) -> None:
    """In one write: other processes, and threads, write into the same file."""
    os.write(2, f"fake: {text}\n".encode())


class Worker:
    """Compiles or loads, and runs requests."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        from vllm.compilation.counter import compilation_counter

        self.counter, self.options, self.rank = compilation_counter, options, rank
        self.root = Path(os.environ["FAKE_CACHE_ROOT"])
        config = Path(options.model, "config.json").read_bytes()
        decides = [options.model, options.max_num_seqs, options.max_model_len, config.hex()]
        name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
        replica = f"_{options.replica}" if options.data_parallel_size > 1 else ""
        self.folder = self.root / "aot" / name / f"rank_{rank}{replica}"
        self.loaded: set[str] = set()
        self.has_bias = False

    def start(self) -> None:
        if has("raises-at-start"):
            raise SystemExit("fake: RuntimeError: no memory for the weights")
        (self.folder / "kernels").mkdir(parents=True, exist_ok=True)
        (self.folder / "kernels" / "x.lock").touch()
        subprocess.run([str(STANDINS / "bin" / "g++"), "--version"], check=True, stdout=subprocess.DEVNULL)
        if (self.folder / "model").exists() and not has("silent-miss"):
            self.load_or_compile()
        else:
            self.compile_all()
        if has("keeps-a-lock"):
            self.lock = (self.root / "busy").open("a")
        if has("probes"):
            self.probe()
        self.misbehave()
        self.misbehave_by_other_programs()

    def load_or_compile(self) -> None:
        if has("eager"):
            return
        try:
            self.load()
        except (OSError, ValueError) as error:
            say(f"compiling model again due to a load failure: {error}")
            if os.environ.get("FAKE_FORCE_LOAD") == "1":
                raise
            self.compile_all()

    def load(self) -> None:
        if has("load-failure"):
            raise ValueError("'function' object has no attribute 'finalize_loading'")
        aot_compilation_path = str(self.folder / "model")  # By this name the agent finds it, as in vLLM.
        artifact = json.loads(Path(aot_compilation_path).read_text())
        if artifact["root"] != str(self.root):
            raise ValueError(f"the artifact is for {artifact['root']}")
        wrapper = self.folder / "wrapper.py"
        exec(compile(wrapper.read_text(), str(wrapper), "exec"), {})
        for kernel in artifact["kernels"]:
            self.load_kernel(Path(kernel))
        self.counter.num_aot_artifacts_loaded += 1

    def compile_all(self) -> None:
        self.counter.num_aot_compiles += 1
        kernels = [self.kernel(name) for name in KERNELS]
        write(self.folder / "wrapper.py", f"KERNELS = {[str(path) for path in kernels]}\n")
        write(self.folder / "model", json.dumps({"root": str(self.root), "kernels": [*map(str, kernels)]}))
        self.counter.num_aot_artifacts_saved += 1
        if has("leak-secret"):
            write(self.folder / "notes.json", json.dumps({"token": os.environ.get("FAKE_TOKEN")}))
        if has("link"):
            (self.folder / "link").symlink_to("/etc/hostname")

    def kernel(self, name: str) -> Path:
        """Loads a kernel, which is compiled first where the cache has none."""
        path = self.folder / "kernels" / f"{name}.so"
        if not path.exists():
            self.compile(name, path)
        self.load_kernel(path)
        return path

    def compile(self, name: str, path: Path) -> None:
        source = path.with_suffix(".cpp")
        write(source, f"// {name} for {self.options.model} below {self.root}\n")
        command = [str(STANDINS / "bin" / "g++"), str(source), "-shared", "-o", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "FAKE_LIBRARY": a_library()})
        self.counter.num_inductor_compiles += 1

    def load_kernel(self, path: Path) -> None:
        if str(path) not in self.loaded:
            ctypes.CDLL(str(path))
            self.loaded.add(str(path))

    def misbehave(self) -> None:
        planted = self.folder / "kernels" / "planted.so"
        if has("compile-at-start"):
            self.compile("more", self.folder / "kernels" / "more.so")
        if has("rewrite"):
            self.rewrite()
        if has("delete"):
            (self.folder / "kernels" / "layer.so").unlink()
        if has("plant") or has("plant-and-load"):
            subprocess.run(["/bin/sh", "-c", 'cat "$0" > "$1"', a_library(), str(planted)], check=True)
        if has("plant-and-load"):
            self.load_kernel(planted)
        if has("counts-wrong"):
            self.counter.num_aot_compiles += 1

    def misbehave_by_other_programs(self) -> None:
        if has("builds-by-script"):
            script = Path(self.options.model, "build.sh")
            build = f'xargs -I @ {STANDINS / "bin" / "g++"} @ -shared -o "$0.so"'
            script.write_text(f'echo > "$0.cpp"; echo "$0.cpp" | {build}\n')
            subprocess.run(
                ["/bin/sh", str(script)], check=True, env={**os.environ, "FAKE_LIBRARY": a_library()}
            )
        if has("loads-what-it-made"):
            made = Path(self.options.model, "made.so")
            subprocess.run(
                ["/bin/sh", "-c", 'cp "$0" "$1.x" && mv "$1.x" "$1"', a_library(), made], check=True
            )
            ctypes.CDLL(str(made))
        if has("swap-cache"):
            script = (
                'mv "$0" "$0.x" && cp -a "$0.x" "$0" && echo > "$0/other" && rm -r "$0" && mv "$0.x" "$0"'
            )
            subprocess.run(["/bin/sh", "-c", script, str(self.root.parent)], check=True)
        if has("plant-beside-agent"):
            agent = Path(os.environ["AOTGAUDI_WITNESS"]).with_name("witness")
            script = 'echo "import os" > "$0/sitecustomize.py"'
            subprocess.run(["/bin/sh", "-c", script, str(agent)], check=True)
        if has("loads-from-memory") or has("loads-from-shm"):
            self.load_from_memory(Path(a_library()).read_bytes())
        if has("runs-what-it-removes"):
            library = self.folder / "kernels" / "passing.so"
            library.write_bytes(Path(a_library()).read_bytes())
            assert ctypes.CDLL(None).dlopen(os.fsencode(library), 2)
            library.unlink()

    def load_from_memory(self, library: bytes) -> None:
        if has("loads-from-memory"):
            descriptor = os.memfd_create("kernel")
            os.write(descriptor, library)
            ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        else:
            path = Path(f"/dev/shm/fake-{os.getpid()}.so")
            path.write_bytes(library)
            ctypes.CDLL(str(path))
            path.unlink()

    def probe(self) -> None:
        """What libraries do beside their caches: filelock 4.3, tempfile, and whoever tries whether a folder is his."""
        for folder in (self.root, self.folder, self.folder / "kernels"):
            os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600))
            tried, renamed = folder / f".probe-{os.urandom(4).hex()}", folder / "tried"
            for data in ("", "blat"):
                tried.write_text(data)
                tried.rename(renamed)
                renamed.unlink()
            with contextlib.suppress(OSError):
                (folder / "nothing").rename(folder / "nowhere")
            with contextlib.suppress(OSError):
                folder.open("w")
            (folder / "tree").mkdir()
            (folder / "tree" / "leaf").write_text("x")
            (folder / "tree" / "leaf").unlink()
            (folder / "tree").rmdir()

    def rewrite(self) -> None:
        subprocess.run(["/bin/sh", "-c", 'echo >> "$0"', str(self.folder / "wrapper.py")], check=True)

    def answer(self, body: dict[str, object]) -> str:
        return self.execute_model(scheduled(body))

    def execute_model(self, scheduler_output: SchedulerOutput) -> str:
        """As vLLM's model runner has it: with the requests of a step in a local variable of that name."""
        body = scheduler_output.body
        for name in KINDS:
            if body.get(name):
                self.kernel(name)
        self.has_bias |= "logit_bias" in body
        if has("order-matters") and body.get("logprobs") and not self.has_bias:
            self.kernel(f"early-{os.getpid()}")
        if body["model"] != self.options.served_model_name:
            self.kernel("adapter")
        if has("compile-live"):
            self.compile("live", self.folder / "kernels" / "live.so")
        if has("probes"):
            self.probe()
        if has("rewrite-live"):
            self.rewrite()
        prompt = json.dumps([body.get(name) for name in ("prompt", "messages", "input")])
        if has("slow-answers"):
            time.sleep(2)
        weights = Path(self.options.model, "model.safetensors")
        salt = weights.read_text() if weights.exists() else ""
        salt += "other" if has("wrong-answer") else ""
        if self.options.data_parallel_size > 1:
            say(f"rank {self.options.replica} computes {body['request_id']}")
        return hashlib.sha256((prompt + salt).encode()).hexdigest()[:16]


class SamplingParams:
    """vLLM's, by its names."""

    def __init__(self, body: dict[str, object] | None = None) -> None:
        asked = body or {}
        self.temperature = asked.get("temperature", 1.0)
        self.logprobs, self.max_tokens = asked.get("logprobs"), asked.get("max_tokens", 16)
        self.stop = asked.get("stop", [])


class NewRequest:
    def __init__(self, req_id: str, body: dict[str, object]) -> None:
        self.req_id, self.sampling_params = req_id, SamplingParams(body)
        self.prompt_token_ids = list(range(len(str(body.get("prompt", "")))))


class SchedulerOutput:
    def __init__(self, body: dict[str, object], requests: list[NewRequest]) -> None:
        self.body, self.scheduled_new_reqs = body, requests
        self.num_scheduled_tokens = {one.req_id: len(one.prompt_token_ids) for one in requests}


def scheduled(body: dict[str, object]) -> SchedulerOutput:
    return SchedulerOutput(body, [NewRequest(f"cmpl-{body.get('request_id', 0)}-0", body)])


def write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # What was restored is read-only.
    path.write_text(text)


def a_library() -> str:
    """A small library that any process of this interpreter can load."""
    found = Path(str(sysconfig.get_config_var("DESTSHARED"))).glob("*.so")
    return str(min(found, key=lambda path: (path.stat().st_size, path.name)))


def run_worker(connection: Connection, options: argparse.Namespace, rank: int) -> None:
    be_a_child()
    if not has("skip-plugin"):
        load_plugins()
    worker = Worker(options, rank)
    if has("worker-dies") and rank == options.workers - 1:
        connection.send(None)
        os.kill(os.getpid(), signal.SIGKILL)
    worker.start()
    serve_requests([connection], worker.answer)


def run_engine(connections: list[Connection], options: argparse.Namespace, replica: int) -> None:
    be_a_child()
    os.environ["FAKE_RANK"] = str(replica)
    options.replica = replica
    load_plugins()
    context = multiprocessing.get_context("spawn")
    workers = []
    for rank in range(options.workers):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_worker, args=(theirs, options, rank), name=f"VllmWorker-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        workers.append((process, ours))
    for _, worker in workers:
        worker.recv()

    def answer(body: dict[str, object]) -> str:
        for _, worker in workers:
            with contextlib.suppress(OSError):
                worker.send(body)
        texts = []
        for _, worker in workers:
            with contextlib.suppress(OSError, EOFError):
                texts.append(worker.recv())
        return texts[0]

    serve_requests(connections, answer)
    for process, worker in workers:
        worker.close()
        process.join()


def run_api_server(
    engines: list[Connection], options: argparse.Namespace, listening: socket.socket, index: int
) -> None:
    be_a_child()
    os.environ["FAKE_RANK"] = str(index)
    if not has("skip-api-plugins"):
        load_plugins()
    serve(Server(options, engines, listening), lambda: True)


def be_a_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(STANDINS))


def serve_requests(connections: list[Connection], answer: Callable[[dict[str, object]], str]) -> None:
    """Says that it is ready, then answers until all other ends are closed."""
    for connection in connections:
        connection.send("ready")
    asking = list(connections)
    while asking:
        for connection in multiprocessing.connection.wait(asking):
            try:
                connection.send(answer(connection.recv()))
            except (EOFError, OSError):
                asking.remove(connection)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, options: argparse.Namespace, engines: list[Connection], listening: socket.socket
    ) -> None:
        self.options, self.engines, self.lock = options, engines, threading.Lock()
        super().__init__(listening.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        listening.setblocking(False)  # Another API server may have accepted what woke this one.
        self.socket, self.num_asked = listening, 0
        if options.ssl_certfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            if has("other-certificate"):
                shown = Path(os.environ["FAKE_FAULTS"].partition("@")[2])
                context.load_cert_chain(shown, shown.with_suffix(".key"))
            else:
                context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            self.socket = context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)

    def ask(self, body: dict[str, object], rank: str | None) -> str:
        with self.lock:
            self.num_asked += 1
            engine = self.engines[self.num_asked % len(self.engines) if rank is None else int(rank)]
            engine.send(body)
            return str(engine.recv())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if has("crash-live"):
            os._exit(13)
        options = self.server.options
        adapters = [one.partition("=")[0] for one in options.lora_modules]
        if body.get("model") not in (options.served_model_name, options.model, *adapters):
            self.reply(404, {"error": f"no model {body.get('model')}"})
        elif self.path not in PATHS:
            self.reply(404, {"detail": "Not Found"})
        elif has("refuses-requests") or (has("refuses-json") and body.get("response_format")):
            self.reply(400, {"error": "not here"})
        else:
            asked = {**body, "request_id": self.headers.get("X-Request-Id", "none")}
            text = self.server.ask(asked, self.headers.get("X-data-parallel-rank"))
            self.reply(200, {"choices": [{"text": text, "message": {"content": text}}]})

    def reply(self, status: int, document: dict[str, object]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, text: str, *args: object) -> None:
        if self.server.options.log_level == "debug":
            say(text % args)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--api-server-count", type=int)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--served-model-name")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-modules", nargs="*", default=[])
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    for name in ("--runner", "--speculative-config", "--max-num-batched-tokens"):
        parser.add_argument(name)
    options = parser.parse_args(arguments)
    options.api_server_count = options.api_server_count or options.data_parallel_size
    options.replica = 0
    options.served_model_name = options.served_model_name or options.model
    return options


def misbehave_at_start() -> None:
    if has("deaf-at-start"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if has("slow") or has("deaf-at-start"):
        time.sleep(2)
    if has("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if has("crash-at-start"):
        os.write(2, f"fatal: no device for {os.environ.get('FAKE_TOKEN')}\n".encode())
        os._exit(13)
    if has("killed-at-start"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if has("orphan"):
        subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True)


def main() -> int:
    load_plugins()
    options = parse(sys.argv[1:])
    os.environ.setdefault("FAKE_CACHE_ROOT", str(Path.home() / ".cache" / "fake"))
    misbehave_at_start()
    listening = socket.create_server((options.host, options.port))
    engines, coordinator = Engines(options), Coordinator()
    try:
        if options.data_parallel_size > 1 and not has("no-coordinator"):
            coordinator.start()
        engines.start()
    except EOFError:
        say("the engine failed")
        return 1
    say(f"serving {options.model} on port {options.port}")
    if options.api_server_count > 1:
        status = serve_by_others(options, engines, listening)
    else:
        status = serve(Server(options, engines.for_server(0), listening), engines.are_alive)
    engines.end()
    coordinator.end()
    return status


class Engines:
    """The processes of the data-parallel ranks, and a connection to each for every API server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.processes: list[BaseProcess] = []
        self.connections: list[list[Connection]] = []

    def start(self) -> None:
        """Returns when all are ready. Raises EOFError if one fails."""
        context, num = multiprocessing.get_context("spawn"), self.options.data_parallel_size
        for replica in range(num):
            pipes = [context.Pipe() for _ in range(self.options.api_server_count)]
            name = "EngineCore" if num == 1 else f"EngineCore_DP{replica}"
            arguments = ([theirs for _, theirs in pipes], self.options, replica)
            self.processes.append(context.Process(target=run_engine, args=arguments, name=name))
            self.processes[-1].start()
            for _, theirs in pipes:
                theirs.close()
            self.connections.append([ours for ours, _ in pipes])
        for connections in self.connections:
            for connection in connections:
                connection.recv()

    def for_server(self, index: int) -> list[Connection]:
        return [connections[index] for connections in self.connections]

    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def end(self) -> None:
        for connections in self.connections:
            for connection in connections:
                connection.close()
        for process in self.processes:
            process.join()


class Coordinator:
    """The process of the ranks' coordinator, started as vLLM starts it (vllm/v1/engine/coordinator.py)."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None

    def start(self) -> None:
        sys.path.insert(0, str(STANDINS))
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        target, name = DPCoordinatorProc.run_coordinator, "VLLM_DP_Coordinator"
        self.process = context.Process(target=target, name=name, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()

    def end(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.join()


def serve_by_others(options: argparse.Namespace, engines: Engines, listening: socket.socket) -> int:
    """Starts the API servers, and ends them when this process is asked to end or an engine dies. Returns the exit code."""
    context = multiprocessing.get_context("spawn")
    servers = [
        context.Process(
            target=run_api_server,
            args=(engines.for_server(index), options, listening, index),
            name=f"ApiServer_{index}",
        )
        for index in range(options.api_server_count)
    ]
    for server in servers:
        server.start()
    status = wait_for_end(engines.are_alive)
    for server in servers:
        server.terminate()
        server.join()
    return status


def serve(server: Server, is_well: Callable[[], bool]) -> int:
    threading.Thread(target=server.serve_forever, args=(TICK_SECONDS,), daemon=True).start()
    status = wait_for_end(is_well)
    if status == 0:
        server.shutdown()
    return status


def wait_for_end(is_well: Callable[[], bool]) -> int:
    """Waits until the process is asked to end, or is no longer well. Returns the exit code.

    The handler takes no lock: it may interrupt whoever holds that, for ever where an Event's is waited for in this thread.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        ignored = has("hang-at-end")
        signal.signal(number, signal.SIG_IGN if ignored else lambda number, _: asked.append(number))
    while not asked:
        if not is_well():
            say("the engine died")
            return 1
        time.sleep(TICK_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
