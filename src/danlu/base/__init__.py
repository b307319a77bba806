"""Floor 0: what every other floor may use. Standard library only."""
