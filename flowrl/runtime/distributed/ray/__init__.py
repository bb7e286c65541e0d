"""Ranks as Ray actors, on this machine or on a cluster. Nothing else of flowrl knows Ray."""
