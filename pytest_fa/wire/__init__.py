"""All that crosses the border of a process: jobs, commands, channels and shared memory."""
