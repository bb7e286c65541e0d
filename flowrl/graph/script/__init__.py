"""What is found in the text and the objects of a user's script: lines, names, code that is reached, its state."""
