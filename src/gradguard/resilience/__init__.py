"""What outlives a burst of bad steps: snapshots, and the ladder that goes back to them."""
