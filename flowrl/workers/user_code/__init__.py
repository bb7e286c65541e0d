"""Calls of user code, and what becomes of them: what they print, return and fail with."""
