"""Floor 3: computes fast, and only what has been verified."""
