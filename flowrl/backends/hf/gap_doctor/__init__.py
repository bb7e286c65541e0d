"""What explains that an engine's log-probabilities differ from the trainer's: frozen rows, one change at a time."""
