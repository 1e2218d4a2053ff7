"""What is kept and shown: record types (the only JSON), the machine they were made on, the table."""
