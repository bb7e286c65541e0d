"""What the words of a command line name: options, parameters of a program, a script, a recorded run."""
