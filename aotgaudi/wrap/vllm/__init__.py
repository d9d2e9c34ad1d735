"""A spec from what users of vLLM on Gaudi already have: a command line, environment variables, a config.json."""
