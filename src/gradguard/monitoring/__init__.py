"""Watching runs: `record` (files), `judge` (verdicts), `show` (pages), `observe` (measures; torch), `tune` (tries)."""
