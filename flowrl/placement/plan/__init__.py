"""The plan: pools, places and the pipeline, read from a file, held against its rules, and shown."""
