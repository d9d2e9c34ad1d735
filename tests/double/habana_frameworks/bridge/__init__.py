"""The half of the double that is C++ in the bridge: flags, events, keys, recipes and their cache."""
