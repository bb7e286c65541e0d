"""The driver of a run: steps, calls in their order, and what the user is told."""
