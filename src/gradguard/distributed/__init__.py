"""The one floor that knows of `torch.distributed`: process groups, shards, and the one all-reduce of the norms."""
