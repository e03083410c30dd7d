"""Per-sample gradients: their norms, their clipped sum, and private training with it."""
