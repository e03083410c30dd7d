"""Watching: record a run, judge it, draw it. Everything but the observer works on plain numbers, without torch."""
