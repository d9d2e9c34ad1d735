"""What was asked of a server, and which steps its scheduler forms of that: traces, and their replay."""
