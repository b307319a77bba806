"""Floor 3: decides on paper. Pure arithmetic, no torch."""
