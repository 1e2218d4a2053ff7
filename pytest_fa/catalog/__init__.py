"""What can be run: variants, cases, suites, and the plan that pairs them.  No torch, no pytest."""
