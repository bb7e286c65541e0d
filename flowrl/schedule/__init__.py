"""WHEN: steps in flight and their commit, as pure bookkeeping without clocks, threads or tensors."""
