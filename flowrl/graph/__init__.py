"""WHAT is computed: field types, ops, the trace of a program, its graph, the check and the drawing. No torch."""
