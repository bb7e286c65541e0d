"""A traced program and its plan, made into what a runtime executes."""
