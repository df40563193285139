"""`append`: rotate queries and keys, write keys and values into active pages."""
