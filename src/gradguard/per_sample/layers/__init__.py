"""Rules of layers: per-sample gradients from a layer's input and its output's gradient."""
