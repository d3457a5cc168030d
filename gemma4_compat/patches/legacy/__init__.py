"""Legacy: bugs that later releases do not have."""
