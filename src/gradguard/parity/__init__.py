"""Whether two runs have the same gradients: sketches of them, bars of rounding, and a verdict for each parameter."""
