"""Checkpoints of a run: what is in them, which one is whole, and how they are written meanwhile."""
