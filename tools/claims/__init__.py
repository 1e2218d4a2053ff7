"""What others have published about the speed of kernels, and whether the saved records of a GPU reproduce it."""
