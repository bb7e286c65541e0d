"""The weights of a model as a worker names them: boxes, those that are frozen, adapters in a folder."""
