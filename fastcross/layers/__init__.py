"""The cross layers and the embedding layer as modules, and what is known of other packages' cross layers."""
