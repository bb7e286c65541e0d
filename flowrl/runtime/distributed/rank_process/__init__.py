"""What runs in the process of a rank: its workers, their rows, their weights, and the rows that leave one by one."""
