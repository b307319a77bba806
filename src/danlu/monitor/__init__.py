"""Floor 4: what is measured, shown and written down."""
