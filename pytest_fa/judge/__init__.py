"""Is an output right: truth, yardstick, tolerance policies, the verdict."""
