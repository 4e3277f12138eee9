"""What the GPU kernels' machine code shows, compiled without a GPU."""
