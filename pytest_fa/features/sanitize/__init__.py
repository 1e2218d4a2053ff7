"""`--fa-sanitize`: runs one call of a variant under compute-sanitizer.  Imports no torch."""
