"""Shows a record to people and to programs. Nothing here needs torch, and nothing here judges: that is `judge`'s.

A finished run is a page (`report.page`), a panel in a terminal (`report.summary`) or JSON (`report.json_summary`); all
three say the same judgement, and the page adds figures (`report.figures`, `report.layer_section`). A run in progress is
followed by `live_tail`, which feeds each line of the record to `run_state` and draws that with `tail_view`.
The lines of a `gradguard.Monitor` go to files, functions and dashboards through `sinks`, and its findings to a function
of the user's through `alerts`. Tables in a terminal are all printed by `text_table`.

**Guarantees.** A record is only read, and a page never replaces it. Names and messages that come from a record are
escaped on the page and made printable in a terminal. The memory of `tail` and of sinks does not grow with the run, and
a sink or a function that fails is dropped with one warning and never stops training.
"""
