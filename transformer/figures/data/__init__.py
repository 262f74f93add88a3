"""What the figures show, as plain arrays, computed by the package's own code; nothing here draws."""
