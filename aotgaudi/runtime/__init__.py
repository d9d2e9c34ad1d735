"""Loads and binds verified artifacts, and guards against compiling. Online."""
