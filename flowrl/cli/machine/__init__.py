"""What ``flowrl doctor`` tells of this machine, and tries on it."""
