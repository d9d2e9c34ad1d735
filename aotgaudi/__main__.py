"""``python -m aotgaudi``: the command line."""

from aotgaudi.cli.main import main

if __name__ == "__main__":
    main()
