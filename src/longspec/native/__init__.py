"""Our C code for decoding on a CPU, compiled on the machine that runs it."""
