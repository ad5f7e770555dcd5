"""The functions behind the commands (build, verify, check …), each a list of its steps."""
