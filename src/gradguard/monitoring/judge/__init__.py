"""Judgements of a run: findings, verdict, recommendation, replay. Plain numbers, without torch."""
