"""Is an output right: truth, same-precision reference, tolerance policies, the verdict."""
