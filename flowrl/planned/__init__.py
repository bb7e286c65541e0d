"""A traced program with its plan: how its calls look to the schedule, the cost model, the check, and a reader."""
