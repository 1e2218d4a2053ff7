"""What imports torch: the process of the user's functions, and the judge's questions to it."""
