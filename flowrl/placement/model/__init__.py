"""The models: sizes, weights, and which part of each weight a rank of a mesh holds."""
