"""Variants to builds: toolchain, command line and key, cache, ninja, resources, machine code.  Torch-free."""
