"""The candidate and the judge's connection to it: commands, shared memory, and the process that runs the kernel."""
