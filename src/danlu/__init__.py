"""danlu (丹炉): a training system for transformer language models, from a laptop to a cluster."""
