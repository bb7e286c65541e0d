"""Sampling with the reference engine: caches, the tokens of many rows at a time, rows that join and leave."""
