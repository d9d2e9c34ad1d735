"""Shares stores through directories and object stores, and bundles as OCI images."""
