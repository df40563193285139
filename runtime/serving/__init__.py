"""Between the engine loop and a server: the tensor contract and the turns in flight. Knows no Triton."""
