"""Floor 4: a model over many ranks, with PyTorch's distributed parts."""
