"""Inputs, the device, and calling a variant.  torch from here on."""
