"""Quality of a compressed cache: generated conversations, scores against the full cache, and their report."""
