"""Floor 4: the layout over devices."""
