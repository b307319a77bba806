"""One file a place that metrics go."""
