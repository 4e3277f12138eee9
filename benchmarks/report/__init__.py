"""From the committed runs to README.md, docs/benchmarks.md and the figures."""
