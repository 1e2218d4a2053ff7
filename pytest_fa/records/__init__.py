"""Record types, the files they are written to, and the machine and source they describe.  Does not import torch."""
