"""Annotations and the job summary of GitHub Actions."""
