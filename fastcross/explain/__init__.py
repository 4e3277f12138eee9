"""What a trained DCN learned, exactly: its crosses by field, over a data set and for one example."""
