"""Floor 4: number formats."""
