"""`--fa-sweep`: searches the values of a variant's defines, and gates the best configuration against the parent."""
