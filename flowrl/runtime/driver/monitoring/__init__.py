"""What a run notes of itself while it goes on, and what it tells of: rows, waits, lags, lengths and health."""
