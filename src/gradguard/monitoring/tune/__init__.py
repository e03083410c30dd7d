"""``gradguard tune``: the same script under several clipping rules, and which of them trains best."""
