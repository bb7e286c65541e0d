"""The reference engine, on transformers: every decoder-only model it loads, on a CPU or one CUDA device."""
