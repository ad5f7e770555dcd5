"""The engines that run graphs: one file each, one process each."""
