"""`pytest_fa.load`, `.check`, `.time` and `.gate`: the work of a pytest run, for scripts and notebooks."""
