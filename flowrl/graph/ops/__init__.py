"""What an op is: how it is declared, what a call of it may be given, and how it is run on plain values."""
