"""The program run abstractly: every outcome of its conditions is followed, and its calls are recorded."""
