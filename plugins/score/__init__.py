"""`score`: the largest weight that query rows put on tokens and entries whose log-sum-exp is known."""
