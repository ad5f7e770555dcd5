"""Templates of programs that load, run and test a bundle, and the values that fill them."""
