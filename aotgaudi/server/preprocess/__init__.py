"""Turns what clients send into requests for the engine, in other processes."""
