"""The command line, with one module per verb. Only this package reads the environment."""
