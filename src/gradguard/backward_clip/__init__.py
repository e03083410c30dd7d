"""Error clip: the gradient of every intermediate value is clipped before the next backward operation takes it."""
