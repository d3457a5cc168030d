"""What functions of the package return, as text, HTML and JSON."""
