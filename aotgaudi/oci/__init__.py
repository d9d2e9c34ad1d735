"""Bundles as OCI images: written, pushed to registries, pulled and unpacked."""
