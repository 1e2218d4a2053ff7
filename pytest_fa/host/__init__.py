"""pytest's side of the processes: it starts and ends servers, judges and candidates, and talks with them."""
