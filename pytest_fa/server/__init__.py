"""The server process: it imports torch, opens no device, and forks judges and candidates."""
