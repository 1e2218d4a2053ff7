"""`--fa-sanitize`: compute-sanitizer around one call of a variant.  No torch."""
