"""``python -m aotgaudi``: the command line.

Python puts the working directory first on ``sys.path``, and this module removes it again. Python has imported `aotgaudi` by
then, possibly from the working directory. The command `aotgaudi` and ``python -P -m aotgaudi`` never look there.
"""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # The working directory may have been deleted.
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]

if __name__ == "__main__":
    from aotgaudi.cli.main import main

    main()
