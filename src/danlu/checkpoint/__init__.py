"""Floor 4: the state of a run on disk."""
