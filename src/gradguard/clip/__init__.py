"""Batch clipping: rules that act on the gradients of parameters after backward."""
