"""Presets of the drivers: published variants of an algorithm, a file per driver."""
