"""`linear`: products with the model's weights."""
