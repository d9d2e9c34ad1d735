"""The builder's persistent store: content-addressed objects, and an index of what gave them."""
