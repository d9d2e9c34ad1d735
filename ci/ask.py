"""Starts `aotgaudi serve`, asks one question, and prints the answer and what the server says of itself.

Only the standard library: what a user's own client would do.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

QUESTION, ANSWER = "What is the capital of Japan?", "Tokyo"
READY_TIMEOUT_SECONDS = 60


def main() -> int:
    """Returns 0 when the server answered right and compiled nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aotgaudi", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    port = free_port()
    command = [args.aotgaudi, "serve", "--bundle", args.bundle, "--model", args.model, "--require-warm"]
    started = time.perf_counter()
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
    base = f"http://127.0.0.1:{port}"
    try:
        seconds = wait_ready(server, base, started)
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0}
        answer = post(f"{base}/v1/chat/completions", {"model": Path(args.model).name, **body})
        compilations = metric(get(f"{base}/metrics"), "aotgaudi_compilations_total")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    text = answer["choices"][0]["message"]["content"].strip()
    print(f"question:                 {QUESTION}")
    print(f"answer:                   {text}")
    print(f"time to ready:            {seconds:.2f} s (process start to the first 200 from /ready)")
    print(f"compilations after ready: {compilations:.0f}")
    return 0 if compilations == 0 and ANSWER in text else 1


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(server: subprocess.Popen[bytes], base: str, started: float) -> float:
    """Returns the seconds until /ready answered 200; exits when the server did."""
    while time.perf_counter() - started < READY_TIMEOUT_SECONDS:
        if server.poll() is not None:
            sys.exit(server.returncode)
        try:
            get(f"{base}/ready")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.01)
        else:
            return time.perf_counter() - started
    sys.exit("the server did not become ready")


def get(url: str) -> str:
    """Returns the body of a GET."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def post(url: str, body: dict[str, object]) -> dict:
    """Returns the JSON that a POST of JSON answers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def metric(exposition: str, name: str) -> float:
    """Returns the sum of a metric's samples over all its labels."""
    lines = [line for line in exposition.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert lines, f"no sample of {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
