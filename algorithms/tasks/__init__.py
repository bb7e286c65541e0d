"""Tasks that need no download: data, reward or environment, and a model small enough for two cores."""
