"""Decide whether an output is right: truth, same-precision reference, tolerance policies, verdict, diagnosis."""
