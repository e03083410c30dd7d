"""What a training state is made of, and how it is copied and written back: for skips and for snapshots."""
