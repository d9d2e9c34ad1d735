"""``python -m aotgaudi``: the command line.

Python puts the working directory first on ``sys.path``; it is taken off again here. By then Python has imported `aotgaudi`,
from there if it finds it there. The command `aotgaudi` and ``python -P -m aotgaudi`` never look there.
"""

import os
import sys

if sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

if __name__ == "__main__":
    from aotgaudi.cli.main import main

    main()
