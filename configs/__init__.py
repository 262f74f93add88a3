"""Config pages: one a family, plain data. A file is the registry entry."""
