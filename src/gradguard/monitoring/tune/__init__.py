"""``gradguard tune``: runs one script briefly under several clipping rules, and says which trains best.

`candidates` chooses the rules from the record of the script as it is; `trials` runs each of them with each seed, as a
`gradguard run` in a process of its own, and ends a run that has diverged. `score` compares the losses that they end
with, or a metric that they print, over seeds; `show` says the result in one sentence, a table and a command.

**Guarantees.** All rules have the same seeds, and one seed of all rules is complete before the next begins. A rule is
called better only where the 95 % interval of the difference over seeds excludes 0, or the other diverged more often.
The script's own clip stays in place, and each rule acts behind it.
"""
