"""WHERE: which worker runs in which pool, as integers and names."""
