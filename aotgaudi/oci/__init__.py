"""Bundles as OCI images and artifacts: written, unpacked, pushed to registries and pulled from them."""
