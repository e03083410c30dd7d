"""Watch runs: `observe` measures (with torch), `record` stores, `judge` diagnoses, `show` draws, `tune` tries rules."""
