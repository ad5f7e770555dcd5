"""The files of checkpoints: tensors, and the spec of an attention layer of a config.json."""
