"""What a role does: the workers, their ops, and the engines they ask for."""
