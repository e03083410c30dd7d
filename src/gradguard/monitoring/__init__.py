"""Watching a run, in four rooms: `record` (files), `judge` (verdicts), `show` (pages), `observe` (measures; torch)."""
