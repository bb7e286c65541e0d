"""How tokens come about: tokenizers, prompts from a text with names, sampling, temperature, packed columns."""
