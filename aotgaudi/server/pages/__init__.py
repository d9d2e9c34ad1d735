"""A page that shows the running server."""
