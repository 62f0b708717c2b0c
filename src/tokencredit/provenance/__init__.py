"""What made a run: parts from Python and from files, and the machine and software."""
