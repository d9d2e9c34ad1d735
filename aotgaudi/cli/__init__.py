"""The command line: one module a verb; the only reader of the environment."""
