"""The builder's persistent store: content-addressed objects, and records of the keys that produced them."""
