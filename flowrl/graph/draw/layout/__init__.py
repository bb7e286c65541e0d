"""Where everything in a picture stands, and how readable that is."""
