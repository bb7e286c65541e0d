"""Workers in the process of the driver."""
