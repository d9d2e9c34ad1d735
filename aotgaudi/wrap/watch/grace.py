"""How long a guest has to end."""

GRACE_SECONDS = 10.0
"""After SIGTERM, where its user says nothing."""
