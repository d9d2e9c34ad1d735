"""The engine: requests in, tokens out. Continuous batching over steps whose every shape has an entry."""
