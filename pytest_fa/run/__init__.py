"""Create inputs, open the device, load a variant and call it.  The first layer that imports torch."""
