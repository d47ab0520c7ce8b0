"""Parameters that are sharded over several processes."""
