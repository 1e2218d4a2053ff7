"""`--fa-selftest`: tests the checks, with kernels that have exactly one mistake each and with correct kernels."""
