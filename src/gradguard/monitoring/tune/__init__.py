"""``gradguard tune``: runs one script briefly under several clipping rules, and reports which rule trains best.

`candidates` chooses the rules from a record of the unchanged script. `trials` runs each rule with each seed, as a
`gradguard run` in its own process, and ends a run that has diverged. `score` compares the final losses, or a metric
that the script prints, over seeds. `show` reports the result in one sentence, a table and a command.

**Guarantees.** All rules use the same seeds, and all rules run with one seed before the next seed begins. A rule is
called better only if the 95 % interval of the difference over seeds excludes 0, or if the other rule lost a larger
share of its runs.
The script's own clip stays in place, and each rule acts after it.
"""
