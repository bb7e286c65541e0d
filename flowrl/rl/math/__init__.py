"""The mathematics, on packed torch tensors: pure functions that know neither graph nor batch."""
