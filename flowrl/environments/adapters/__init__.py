"""Environments of other packages: they are played as they are, and their rewards are those of the package."""
