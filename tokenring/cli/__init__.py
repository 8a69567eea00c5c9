"""The command `tokenring`: a room for each sub-command. Nothing imports it."""
