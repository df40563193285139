"""`attend`: attention over active pages and committed blocks of one KV head."""
