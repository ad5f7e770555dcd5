"""Known faults: what a graph or a runtime may do wrong, as changes of a reference."""
