"""The experts of a mixture-of-experts layer in 4 bits."""
