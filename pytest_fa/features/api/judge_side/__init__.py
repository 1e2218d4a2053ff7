"""What imports torch: a function that is judged in this process."""
