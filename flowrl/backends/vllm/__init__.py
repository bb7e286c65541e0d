"""vLLM, which only generates: in a process of its own, with the weights that are published into it."""
