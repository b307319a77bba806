"""Floor 4: text in, batches of token windows out."""
