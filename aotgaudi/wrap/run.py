"""From a bundle and a command to a guest that serves warm. The order is the guarantee, and this page has all of it.

1. The signature, if keys are trusted; then the index; then launch and receipt, which must be those that it names.
2. What is asked for here is compared with what was sealed: command, variables, model, versions, machine. What differs is
   named, before anything is read of the cache.
3. Every file is hashed while it is copied into a private place. What the guest loads is what was hashed.
4. The guest starts there, with a witness in each of its processes.
5. It is watched, asked the exercise, and judged; only then is it ready.

Nothing of the bundle is interpreted before its signature holds, and nothing of the cache is by us at all.
"""

from __future__ import annotations

from aotgaudi.wrap.readiness import RunOptions, prepare
from aotgaudi.wrap.signals import Signals


def run(options: RunOptions) -> int:
    """Runs a guest from a bundle until it ends; returns its exit code. For the main thread of a process of its own.

    Raises:
        CorruptError, UntrustedError: the bundle's bytes are not what was sealed, or not to be trusted.
        NotWarmError, TargetError: the launch, or this machine, is another one, or the guest was not warm.
        SpecError, StoreError: the command, the root or the address cannot be used.
        GuestError: the guest ended or hung before it was ready.
    """
    with Signals() as signals:
        admitted = prepare(options)  # 1 and 2
        from aotgaudi.wrap.supervise import start  # Only here: who is refused waits for none of it.

        return start(options, admitted, signals)  # 3 to 5
