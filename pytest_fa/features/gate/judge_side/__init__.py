"""The part of the gate that runs in the judge: times the arms beside each other."""
