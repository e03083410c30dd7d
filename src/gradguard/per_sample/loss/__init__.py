"""Whether a loss is the mean, or the sum, of the samples' own: read from its graph when its backward begins."""
