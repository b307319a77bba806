"""One file an operation: reference, native variant, shapes, tolerance."""
