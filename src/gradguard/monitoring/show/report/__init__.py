"""The report of a run: one self-contained HTML page, a terminal summary, and plain text."""

from gradguard.monitoring.show.report.json_summary import json_summary, text_summary
from gradguard.monitoring.show.report.page import page_beside, write_report
from gradguard.monitoring.show.report.summary import print_comparison, print_summary

__all__ = ["json_summary", "page_beside", "print_comparison", "print_summary", "text_summary", "write_report"]
