"""Bundles: a manifest, a receipt and artifacts, sealed in one directory and verified before use."""
