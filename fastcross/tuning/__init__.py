"""Many experiments instead of one: a search over settings, the paper's tables, crosses for models that need them."""
