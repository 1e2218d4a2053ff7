"""The process boundary: jobs and results as JSON, the client that starts worker processes, and the code they run."""
