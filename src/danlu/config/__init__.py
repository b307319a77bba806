"""Floor 1: every key a user can write, one file a block. No torch."""
