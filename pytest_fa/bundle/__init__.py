"""What leaves the machine: where the source stands, what the environment is, and one archive with all of a run."""
