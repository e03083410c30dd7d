"""What is measured of a run, and when: from a script, a process, or a loop of one's own."""
