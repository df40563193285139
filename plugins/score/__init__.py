"""`score`: the largest weight that query rows put on tokens and entries, or the norm of all; log-sum-exp known."""
