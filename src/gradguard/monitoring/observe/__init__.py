"""Measure a run, from a script, a process or a training loop."""
