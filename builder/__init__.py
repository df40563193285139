"""Builds engines: checkpoints in, an engine directory with weights and a manifest out."""
