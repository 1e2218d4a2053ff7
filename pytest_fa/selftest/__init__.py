"""`--fa-selftest`: the judge, tried on kernels with one mistake each and on right twins."""
