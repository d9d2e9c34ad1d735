"""Why something is not warm: keys wanted now, compared with the keys of what was built before. Builds nothing."""
