"""Answers of what touches the world, kept so that it is asked once."""
