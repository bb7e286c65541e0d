"""The search for the placement with the shortest step."""
