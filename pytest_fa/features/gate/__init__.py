"""The gate: confidence intervals over processes, two analyses, and the verdict.  Imports no torch."""
