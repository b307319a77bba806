"""One file a number format."""
