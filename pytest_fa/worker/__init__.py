"""The process boundary: jobs and results as JSON, the client that starts processes, and what runs in them."""
