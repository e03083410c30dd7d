"""Decide whether a loss is the mean, or the sum, of the samples' own losses, from its graph as its backward begins."""
