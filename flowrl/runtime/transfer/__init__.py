"""Weights on their way between processes: planned (``plan``), cut into messages (``messages``), sent (``execute``)."""
