"""What a program holds in the place of values that are not there yet: batches, fields, numbers and steps."""
