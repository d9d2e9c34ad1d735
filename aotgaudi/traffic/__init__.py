"""Traces of requests, and their replay: which steps a server's scheduler forms for them, and what these cost."""
