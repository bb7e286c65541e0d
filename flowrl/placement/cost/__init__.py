"""What a call costs: seconds from a roofline, a file or a run, and bytes of memory."""
