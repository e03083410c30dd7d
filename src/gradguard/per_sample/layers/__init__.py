"""One rule for each kind of layer: from its input and its output's gradient to per-sample gradients."""
