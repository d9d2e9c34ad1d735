"""Turns clients' bodies into requests for the engine, in separate processes."""
