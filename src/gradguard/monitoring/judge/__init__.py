"""Judgements of a run: findings, verdict, recommended threshold, replay. Plain numbers, without torch."""
