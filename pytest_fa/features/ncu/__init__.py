"""`--ncu`: hardware counters by Nsight Compute, and what bounds a kernel.  Imports no torch."""
