"""The part of `ceilings` that opens the GPU, in a process that does nothing else."""
