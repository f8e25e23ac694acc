"""Triton kernels: each module has private kernels and thin launchers.

The host never reads a value from the device: grids depend on shapes only, and the kernels read the lengths.
So a CUDA graph can capture every launcher.
"""
