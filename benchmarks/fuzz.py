"""Fuzzes every parser that reads what others have written: layers, manifests, receipts, indexes, envelopes,
statements, programs, records, roots and image documents (tests/property/fuzz_targets.py).

For the night: `python benchmarks/fuzz.py --cases 100000`. The cases are shared out among the targets, layers get a
double share. Memory is limited: a parser that wants more than that has failed. A failure ends with 1, is
printed shrunk, and is repeated with --seed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from tests.property.fuzz_targets import Fuzz, targets  # noqa: E402

DOUBLE = ("layer",)


def main() -> None:
    """Runs, and prints a line a target."""
    args = _arguments()
    limit = args.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    chosen = [target for target in targets() if args.only in (None, target.name)]
    shares = [2 if target.name in DOUBLE else 1 for target in chosen]
    failed = False
    for target, share in zip(chosen, shares, strict=True):
        failed |= not _run(target, -(-args.cases * share // sum(shares)), args.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB (limit {args.memory_mib} MiB of address space)")
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="in all  [default: 100000]")
    parser.add_argument("--only", choices=[target.name for target in targets()], help="this target alone")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() & 0xFFFFFFFF, help="[default: from the clock]"
    )
    parser.add_argument("--memory-mib", type=int, default=2048)
    return parser.parse_args()


def _run(target: Fuzz, num_cases: int, number: int) -> bool:
    counted = [0]

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(target.inputs)
    def survive(data: bytes) -> None:
        counted[0] += 1
        target.check(data)

    started = time.perf_counter()
    try:
        survive()
    except Exception as error:
        print(
            f"{target.name}: FAILED after {counted[0]} cases (--only {target.name!r} --seed {number})",
            flush=True,
        )
        print("\n".join([repr(error), *getattr(error, "__notes__", ())]))
        return False
    print(
        f"{target.name:15} {counted[0]:>8} cases in {time.perf_counter() - started:.0f} s: sound", flush=True
    )
    return True


if __name__ == "__main__":
    main()
