"""`python -m pytest_fa doctor`: what this machine has for a run, what it lacks, and what to do about it."""
