"""What several verbs print."""
