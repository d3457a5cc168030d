"""Programs for contributors; they are not part of the package."""
