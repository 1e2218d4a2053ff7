"""`--fa-workload`: one ratio for a mix of cases, each with a weight.  Imports no torch."""
