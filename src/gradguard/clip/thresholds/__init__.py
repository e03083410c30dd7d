"""Clippers that choose their own threshold from the norms of earlier steps. One rule, one file."""
