"""Other people's servers: read from a command line, captured, proved, started from what was sealed, and watched."""
