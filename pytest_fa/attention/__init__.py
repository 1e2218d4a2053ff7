"""The parts of attention, such as the causal mask: a module for each, all of which `parts.PARTS` lists."""
