"""The only folder that uses `torch.distributed`: process groups, shards, and the one all-reduce of the norms."""
