"""How the processes of a group find, hear and watch each other, beside the data."""
