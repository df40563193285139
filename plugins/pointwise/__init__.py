"""`pointwise`: the small operations of a layer that only read and write rows: norms, sums, the gated activation."""
