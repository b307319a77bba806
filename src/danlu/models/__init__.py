"""Floor 4: single-device model code, and a description of it in numbers."""
