"""`commit`: choose, absorb, quantize and write the entries a commit transition keeps."""
