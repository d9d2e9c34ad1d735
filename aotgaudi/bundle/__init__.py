"""Bundles: a manifest, a receipt and the artifacts, sealed into one directory and verified from it."""
