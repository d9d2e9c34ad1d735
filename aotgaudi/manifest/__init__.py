"""Entries, their enumeration from a spec, and the manifest file."""
