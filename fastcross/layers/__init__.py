"""The cross layers and the embedding layer as modules, and a table of other packages' cross layers."""
