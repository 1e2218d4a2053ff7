"""Variants to leaves: toolchain, command line and key, cache, ninja, resources, machine code.  Torch-free."""
