"""Finite spikes: what tells one from the ordinary, and what a step does about it."""
