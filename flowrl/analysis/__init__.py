"""A program under a plan, looked at without running it: checked, priced, drawn, searched for."""
