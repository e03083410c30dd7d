"""The training state, and how it is copied and written back: for skips and for snapshots."""
