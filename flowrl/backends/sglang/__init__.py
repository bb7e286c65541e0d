"""SGLang, which only generates: a server of its own, or one that runs, over its HTTP protocol."""
