"""The command and the environment that start somebody else's server: their words, flags and variables."""
