"""DOING: the program run for real, in order or overlapped, watched, journalled and continued."""
