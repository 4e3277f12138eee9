"""How a workload is measured: verified, timed in turns, weighed, written down."""
