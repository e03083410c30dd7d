"""Showing a run: the report, the live view in a terminal, and dashboards. Without torch."""
