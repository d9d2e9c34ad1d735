"""What runs beside the bridge, a function each, in a process of its own. A probe looks; checks judge."""
