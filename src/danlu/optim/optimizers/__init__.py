"""One file an update rule."""
