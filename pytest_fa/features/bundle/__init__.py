"""Write the source stamp, compare the environment with constraints.txt, and archive the results of a run."""
