"""What is checked and measured of the kernels, with and without a device."""
