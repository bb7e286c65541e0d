"""What a run has on disk: records, journal and checkpoints, each whole or known not to be."""
