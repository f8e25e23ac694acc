"""Triton kernels: each module has private kernels and thin launchers.

Nothing here asks the device for a value: grids are fixed by shapes, lengths are read by the kernels. So
every launcher can be captured in a CUDA graph.
"""
