"""Runs the engine in a separate process, so that neither it nor the API server waits for the other's interpreter lock."""
