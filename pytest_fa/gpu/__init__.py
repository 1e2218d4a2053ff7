"""What the judge and the candidate share: inputs and their guard bands, devices, CUDA graphs, the device tools."""
