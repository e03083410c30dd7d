"""Judges a run by its record: findings, verdict, diagnosis, recommendation, replay. Uses plain numbers, not torch."""
