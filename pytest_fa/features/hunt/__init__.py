"""The hunt: random cases of what a manifest claims, judged until one fails, and the smallest case that does."""
