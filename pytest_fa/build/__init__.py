"""Compile variants: toolchain, command line, keys, cache, ninja, resources, machine code.  Does not import torch."""
