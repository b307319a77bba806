"""Floor 2: this device, its peers, its seed."""
