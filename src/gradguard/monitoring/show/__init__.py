"""Show a record to people and to programs, without torch; the judgements come from `judge`.

A finished run is shown as a page (`report.page`), a panel in a terminal (`report.summary`) or JSON
(`report.json_summary`). All three have the same judgement, and the page adds figures (`report.figures`,
`report.layer_section`). `live_tail` follows a run in progress: it adds each line of the record to a `run_state` and
draws the state with `tail_view`. The lines of a `gradguard.Monitor` go to files, functions and dashboards through
`sinks`, and its findings go to the user's function through `alerts`. `text_table` prints all tables in a terminal.

**Guarantees.** Records are only read, and a page never replaces one. Names and messages from a record are escaped on
the page and made printable in a terminal. The memory of `tail` and of sinks does not grow with the run. A sink that
fails is dropped with one warning, and a function that fails is reported once; neither stops training.
"""
