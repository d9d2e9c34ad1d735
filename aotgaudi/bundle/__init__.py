"""Bundles: a manifest, a receipt and artifacts, sealed into one directory, and verified before they are used."""
