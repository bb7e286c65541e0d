"""Trackers: other programs that show the curves, samples, configuration and graph of a run, when it is asked for."""
