"""Shares stores and bundles through directories, object stores and registries, and transfers objects to and from them."""
