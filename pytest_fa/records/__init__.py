"""What is written down, and where: record types (the only JSON), their files, the machine, the source.  No torch."""
