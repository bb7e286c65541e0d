"""What ``flowrl new`` writes."""
